"""What prompts come from and how completions are judged."""
