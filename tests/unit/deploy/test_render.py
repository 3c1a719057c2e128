from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.deploy.conftest import RECIPE, RenderRecipe, by_kind
from tidemill.core.errors import UserError

# Checked by hand against KubeRay's reference and its sample ray-job.sidecar-mode.yaml. Memory of the head: 1.2 times
# 450 MB of libraries and 2 GB of Ray are 2.74 GiB, and the model of 0.8M parameters needs less than the rest of 3 GiB;
# of a worker: 1.2 times 450 MB and 1 GB are 1.62 GiB.
GOLDEN = """\
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: small
  namespace: default
  labels:
    app.kubernetes.io/name: tidemill
    app.kubernetes.io/instance: small
spec:
  entrypoint: tidemill train @/etc/tidemill/recipe.toml
  submissionMode: SidecarMode
  backoffLimit: 20
  preRunningDeadlineSeconds: 1800
  shutdownAfterJobFinishes: true
  rayClusterSpec:
    rayVersion: 2.60.0
    authOptions:
      mode: token
    enableInTreeAutoscaling: true
    autoscalerOptions:
      version: v2
      idleTimeoutSeconds: 60
      upscalingMode: Default
      env:
      - name: AUTOSCALER_UPDATE_INTERVAL_S
        value: '1'
    headGroupSpec:
      labels:
        ray.io/market-type: on-demand
      rayStartParams:
        num-cpus: '2'
      template:
        metadata:
          labels:
            app.kubernetes.io/name: tidemill
            app.kubernetes.io/instance: small
            tidemill/role: head
        spec:
          restartPolicy: Never
          terminationGracePeriodSeconds: 120
          securityContext:
            runAsNonRoot: true
            runAsUser: 1000
            runAsGroup: 1000
            fsGroup: 1000
            fsGroupChangePolicy: OnRootMismatch
            seccompProfile:
              type: RuntimeDefault
          containers:
          - name: head
            image: registry/tidemill@sha256:0
            env: []
            resources:
              requests:
                cpu: '2'
                memory: 3Gi
              limits:
                cpu: '2'
                memory: 3Gi
            securityContext:
              allowPrivilegeEscalation: false
              capabilities:
                drop:
                - ALL
            volumeMounts:
            - name: recipe
              mountPath: /etc/tidemill
              readOnly: true
            - name: runs
              mountPath: /runs
          volumes:
          - name: recipe
            configMap:
              name: small-recipe
          - name: runs
            persistentVolumeClaim:
              claimName: runs
    workerGroupSpecs:
    - groupName: spot
      replicas: 0
      minReplicas: 0
      maxReplicas: 2
      labels:
        ray.io/market-type: spot
      rayStartParams:
        num-cpus: '1'
      template:
        metadata:
          labels:
            app.kubernetes.io/name: tidemill
            app.kubernetes.io/instance: small
            tidemill/role: spot
        spec:
          restartPolicy: Never
          terminationGracePeriodSeconds: 15
          securityContext:
            runAsNonRoot: true
            runAsUser: 1000
            runAsGroup: 1000
            fsGroup: 1000
            fsGroupChangePolicy: OnRootMismatch
            seccompProfile:
              type: RuntimeDefault
          containers:
          - name: spot
            image: registry/tidemill@sha256:0
            env:
            - name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
              value: '13'
            resources:
              requests:
                cpu: '1'
                memory: 2Gi
              limits:
                cpu: '1'
                memory: 2Gi
            securityContext:
              allowPrivilegeEscalation: false
              capabilities:
                drop:
                - ALL
            volumeMounts:
            - name: recipe
              mountPath: /etc/tidemill
              readOnly: true
          volumes:
          - name: recipe
            configMap:
              name: small-recipe
"""
WITHOUT_TORCH = """\
import sys
from tidemill.cli.app import main
code = main(["deploy", "render", "r.toml", "--out", "out"])
print([name for name in ("torch", "ray", "transformers", "vllm", "numpy") if name in sys.modules], code)
"""


def test_a_small_recipe_as_a_whole(rendered: RenderRecipe) -> None:
    result = rendered()
    assert list(result.files) == [
        "01-configmap-small-recipe.yaml",
        "02-poddisruptionbudget-small-head.yaml",
        "03-rayjob-small.yaml",
    ]
    assert result.files["03-rayjob-small.yaml"] == GOLDEN
    assert result.notes == [
        'pool.kind = "ray" instead of "synthetic"',
        "pool.workers is left out",
        'run.dir = "/runs/small"',
        "pool.max_workers = 2",
        'runtime = "ray"',
        'ray.address = "auto"',
    ]


def test_the_same_input_gives_the_same_bytes(rendered: RenderRecipe) -> None:
    options = ("--deploy.secrets.B=s/b", "--deploy.secrets.A=s/a", "--deploy.queue=q", "--deploy.storage_size=10Gi")
    assert rendered(*options).text == rendered(*options).text
    assert rendered(*options).text == rendered(options[1], options[0], *options[2:]).text


def test_render_loads_no_tensor_library(rendered: RenderRecipe, tmp_path: Path) -> None:
    rendered()
    command = [sys.executable, "-c", WITHOUT_TORCH]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[-1] == "[] 0", ran.stderr
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_a_recipe_with_stages(rendered: RenderRecipe) -> None:
    recipe = RECIPE.replace("[pool]", "[[stage]]\nname = 'a'\nkind = 'rl'\n[[stage]]\nname = 'b'\nkind = 'rl'\n"
                            "model.source = 'stage:a'\n[stage.pool]")  # fmt: skip
    result = rendered(recipe=recipe)
    text = by_kind(result, "ConfigMap")["data"]["recipe.toml"]
    assert 'source = "stage:a"' in text and 'dir = "/runs/small"' in text and "deploy" not in text
    assert "stage.b.pool.max_workers = 2" in result.notes
    (group,) = by_kind(result, "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["maxReplicas"] == 2  # of the stage with the largest pool


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (("--deploy.image=registry/tidemill:1",), "has no digest"),
        (("--deploy.target=gke", "--deploy.notice_s=60"), "needs GKE 1.35"),
        (("--deploy.target=gke", "--deploy.models=gs://bucket"), "deploy.service_account is not set"),
        (("--run.name=Small_Run",), "the job is named small-run"),
        (("--ray.trainer_gpus=1",), "whether the model fits the GPUs is not checked"),
        (("--model.source=org/unknown",), "unknown here"),
    ],
)
def test_remarks(rendered: RenderRecipe, options: tuple[str, ...], note: str) -> None:
    assert [each for each in rendered(*options).notes if note in each]


@pytest.mark.parametrize(
    ("options", "where", "what", "hint"),
    [
        (("--deploy.target=none",), "deploy.target", "missing", "[deploy]"),
        (("--deploy.image=",), "deploy", "image is missing", "name the container image"),
        (("--deploy.storage=gs://bucket",), "deploy", "GCS FUSE cannot hold the journal", "name one on a disk"),
        (("--run.dir=gs://bucket/run",), "run.dir", "cannot hold the run's journal", "/runs"),
        (("--run.dir=/models/run",), "run.dir", "cannot hold the run's journal", "/runs"),
        (("--deploy.target=gke", "--deploy.notice_s=200"), "deploy", "more than GKE gives", "up to 120"),
        (
            ('--ray.reserved_selector={"ray.io/market-type" = "spot"}',),
            "ray.reserved_selector",
            "places the trainer on preemptible nodes",
            "on-demand",
        ),
        (
            ('--deploy.reserved_selector={"cloud.google.com/gke-spot" = "true"}',),
            "deploy",
            "must not be preempted",
            "leave it out",
        ),
        (
            ('--deploy.spot_selector={"cloud.google.com/gke-flex-start" = "true"}',),
            "deploy",
            "flex-start nodes",
            "set flex_start for the reserved part",
        ),
        (("--deploy.flex_start",), "deploy", "needs target", "set both"),
        (
            ("--deploy.target=gke", "--deploy.queue=q", "--deploy.flex_start"),
            "deploy.flex_start",
            "not for flex-start",
            "ray.trainer_gpus",
        ),
        (("--deploy.spot_max=1",), "deploy.spot_max", "fewer than the 2 workers", "raise it to 2"),
        (
            ("--deploy.target=gke", "--deploy.accelerator=h100", "--ray.worker_gpus=1"),
            "deploy.accelerator",
            "no accelerator 'h100'",
            "did you mean nvidia-h100-80gb?",
        ),
        (
            ("--deploy.accelerator=h10", "--ray.worker_gpus=1"),
            "deploy.accelerator",
            "no GPU 'h10'",
            "did you mean h100?",
        ),
        (("--deploy.target=gke", "--ray.worker_gpus=1"), "deploy.accelerator", "missing", "nvidia-b200"),
        (("--deploy.accelerator=h100",), "deploy.accelerator", "no pod asks for a GPU", "ray.trainer_gpus"),
        (
            ("--deploy.accelerator=tpu-v6e-slice", "--ray.worker_gpus=1"),
            "deploy.accelerator = tpu-v6e-slice",
            "TPUs are not supported",
            "MaxText",
        ),
        (("--deploy.models=gs://bucket",), "deploy", "needs target", "PersistentVolumeClaim"),
        (("--deploy.head_memory_gb=0.1",), "deploy.head_memory_gb", "needs at least", "leave it out"),
        (("--task.kind=file", "--task.path=absent.jsonl"), "absent.jsonl", "no such file", "/runs/..."),
        (("--model.source=./",), "model.source", "is a folder of this machine", "deploy.storage"),
    ],
)  # fmt: skip
def test_bad_input(rendered: RenderRecipe, options: tuple[str, ...], where: str, what: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        rendered(*options)
    text = str(raised.value)
    assert where in text.splitlines()[0] and what in text and hint in text, text


SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("option", "where"),
    [
        (f"--deploy.secrets.HF_TOKEN={SECRET}", "secrets.HF_TOKEN"),
        (f'--model.source="{SECRET}"', "model.source"),
        ('--telemetry.alerts=[{ url = "https://hooks.slack.com/services/T/B/x" }]', "telemetry.alerts[0].url"),
        ("--run.name=sk-abcdefghijklmnopqrstuvwxyz", "run.name"),
    ],
)
def test_values_of_secrets_are_refused_and_not_repeated(rendered: RenderRecipe, option: str, where: str) -> None:
    with pytest.raises(UserError) as raised:
        rendered(option)
    text = str(raised.value)
    assert where in text and "secret/key" in text
    assert SECRET not in text


def test_a_missing_recipe(rendered: RenderRecipe) -> None:
    with pytest.raises(UserError, match=r"nowhere\.toml: no such file"):
        rendered("@nowhere.toml")
