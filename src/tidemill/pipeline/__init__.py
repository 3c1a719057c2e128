"""Pipelines: planning the stages of a recipe, running them in order, and reporting on them.

`pipeline/` plans without side effects. The address of a stage is a digest of its kind, of the settings that decide
its result, and of the addresses and file contents of its inputs. Its folder is a run directory named by that address;
`stage.json`, written last, marks it as finished. The inputs, output and neutral keys of each kind are a row of a
table (`config/pipeline.py`); its implementation is a function in a registry (`pipeline/stage_kinds.py`). Precedence,
lowest first: the recipe's top level, the stage's keys, `--section.key`, `--stage.NAME.section.key`.
`pipeline/preflight.py` reports errors of later stages before the first one starts, as far as that is known without
loading a model. `api/stages.py` runs one stage in a run directory of its own, whose manifest has its kind.
"""
