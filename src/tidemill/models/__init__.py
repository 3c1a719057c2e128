"""Where models come from, how they are loaded, and the text codec. Importing this package loads no tensors.

`models/token_tree.py` stores token sequences as a prefix tree. The hidden state of a node depends only on its
ancestors, so one forward pass over the distinct nodes equals a pass over all sequences, and the gradient of a shared
node is the sum over the sequences through it.

- The **trainer** packs each microbatch as one tree: a prompt is computed once per group, a few-shot header once for
  all prompts. In the demo 20 to 60 tokens of several hundred remain.
- The **engine** computes new prompts as a tree below whatever prefix a slot already holds, in the same forward pass
  as one token of each running sample.

The trainer's passes go through `TreeForward` (`models/tree_forward.py`): tree to states to logprobs in one module,
the only place where parameters are used. Attention in a tree (`models/tree_attention.py`) is computed block by block
on a CPU: a block is a run of nodes without a branch, and its keys are those of its path. A GPU uses FlexAttention,
whose block mask follows from the `ends` of the tree alone.
Output layer, softmax and gather are one autograd function (`models/token_logprobs.py`): it keeps the probabilities
that fit `trainer.logits_budget_mb` and computes the others again. On a GPU it is `models/fused_logprobs.py`, which
keeps none, if Triton kernels can run.

Both run the `transformers` model with its attention replaced through the library's attention interface
(`models/attention.py`). A *plan* passed with the call defines which token sees which keys: `TreePlan` in training,
`PackedPlan` and `FixedPlan` in the engine. This equals the model's own function only if tokens interact in attention
alone; `models/loading.py` compares one packed forward with the model's own whenever a model is loaded. Each layer's
window is read from the mask that `transformers` defines. Only `models/auto.py` calls the library's Auto classes, so
code in a model folder is never executed. docs/how-to/models.md lists the tested families.

| engine mode | fast (`PackedPlan`) | batch-invariant (`FixedPlan`) |
|---|---|---|
| shapes | whatever is running | two: one prompt chunk; all slots by one token |
| tokens of a sample | independent of slot and neighbours except for rounding | equal to the last bit |
| continuing a prefix | prefill of the prefix | replay: generated tokens in the decode shape, others in chunks |

When a turn ends and another may follow (`GenerateRequest.resumes`), the sample's keys and values move from its slot
to a parking row (`Parking`), so that the next turn computes only the last token and the observation. New weights
clear these rows; the oldest are overwritten.

In both, token *t* of sample *s* is `argmax(logits / T + Gumbel(hash(s, t, token)))` (`rollout/sampling.py`). A greedy
sample (temperature 0) reports the logprob of the softmax at temperature 1.
"""
