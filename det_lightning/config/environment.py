"""The sections about where trials run: ``resources``, ``environment``, ``bind_mounts`` and the like.

Settings of containers, which nothing reads here, are checked only in outline.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter

from det_lightning.config.document import KeyPath
from det_lightning.config.section import Count, Integer, Positive, Section


class Resources(Section):
    """How many processes or GPUs a trial may use, and how many the experiment."""

    slots_per_trial: Count = 1
    max_slots: Count | None = None
    slots: Integer | None = None
    weight: float = 1
    priority: Annotated[Positive, Field(le=99)] | None = None
    resource_pool: str = ""
    shm_size: Any = None
    devices: list[Any] = []
    is_single_node: bool | None = None
    native_parallel: bool = False
    agent_label: str | None = None


class BindMount(Section):
    """A directory of the machine that containers see."""

    host_path: str
    container_path: str
    read_only: bool = False
    propagation: str = "rprivate"


_KINDS = ("cpu", "cuda", "rocm")


def _same_image(value: Any) -> Any:
    return dict.fromkeys(_KINDS, value) if isinstance(value, str) else value


def _variable(text: str) -> str:
    if not text.partition("=")[0].strip():
        raise ValueError("must be NAME=VALUE, or NAME to pass on the variable of this process")
    return text


_Variables = list[Annotated[str, AfterValidator(_variable)]]
_variables = TypeAdapter(_Variables, config=ConfigDict(strict=True))


def _same_variables(value: Any) -> Any:
    return dict.fromkeys(_KINDS, _variables.validate_python(value)) if isinstance(value, list) else value


class Images(Section):
    """The container image, by the kind of device."""

    cpu: str | None = None
    cuda: str | None = None
    rocm: str | None = None


class EnvironmentVariables(Section):
    """Variables for the trials' processes, by the kind of device."""

    place: ClassVar[KeyPath] = ("environment", "environment_variables")

    cpu: _Variables = []
    cuda: _Variables = []
    rocm: _Variables = []


class Environment(Section):
    """The environment of a trial: variables and containers."""

    place: ClassVar[KeyPath] = ("environment",)

    environment_variables: Annotated[EnvironmentVariables, BeforeValidator(_same_variables)] = EnvironmentVariables()
    image: Annotated[Images, BeforeValidator(_same_image)] = Images()
    force_pull_image: bool = False
    registry_auth: dict[str, Any] | None = None
    add_capabilities: list[str] = []
    drop_capabilities: list[str] = []
    pod_spec: dict[str, Any] | None = None
    ports: dict[str, Integer] = {}
    proxy_ports: list[dict[str, Any]] = []


class Slurm(Section):
    """Options for Slurm."""

    slots_per_node: Positive | None = None
    gpu_type: str | None = None
    sbatch_args: list[str] = []


class Pbs(Section):
    """Options for PBS."""

    slots_per_node: Positive | None = None
    pbsbatch_args: list[str] = []
