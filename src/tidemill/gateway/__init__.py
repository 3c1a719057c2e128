"""An HTTP front in the form of OpenAI's API: requests, answers, limits. What generates is behind `backend.Served`."""
