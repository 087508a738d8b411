"""The sections about where trials run: ``resources``, ``environment``, ``bind_mounts`` and the like."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter

from det_lightning.config.document import KeyPath
from det_lightning.config.section import Count, Integer, Positive, Section, show_value

_MEMORY_SIZE = re.compile(r"([0-9]*[.])?[0-9]+ ?(([kmgtpKMGTP]([iI]?[bB])?)|[bB])?")


def _memory_size(size: Any) -> Any:
    is_size = _MEMORY_SIZE.fullmatch(size) if isinstance(size, str) else isinstance(size, int) and size is not True
    if not is_size:
        raise ValueError(f"must be a number of bytes, or a size such as 4G; got {show_value(size)}")
    return size


def _absolute(path: str) -> str:
    if not PurePosixPath(path).is_absolute():
        raise ValueError(f"must be an absolute path; got {show_value(path)}")
    return path


def _below_the_code(path: str) -> str:
    if PurePosixPath(path) == PurePosixPath("."):
        raise ValueError("must not be the directory of the code itself; name a directory below")
    return path


def _device(value: Any) -> Any:
    """Return the mapping abbreviated as ``host:container:mode``."""
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) not in (2, 3):
        return value
    return dict(zip(("host_path", "container_path", "mode"), parts, strict=False))


class Device(Section):
    """A device of the machine, for containers."""

    host_path: str
    container_path: str
    mode: str = "mrw"


class Resources(Section):
    """How many processes or GPUs a trial may use, and how many the experiment."""

    slots_per_trial: Count = 1
    max_slots: Count | None = None
    slots: Integer | None = None
    weight: float = 1
    priority: Annotated[Positive, Field(le=99)] | None = None
    resource_pool: str = ""
    shm_size: Annotated[int | str | None, BeforeValidator(_memory_size)] = None
    devices: list[Annotated[Device, BeforeValidator(_device)]] = []
    is_single_node: bool | None = None
    native_parallel: bool = False
    agent_label: str | None = None


class BindMount(Section):
    """A directory of the machine that containers see."""

    host_path: Annotated[str, AfterValidator(_absolute)]
    container_path: Annotated[str, AfterValidator(_below_the_code)]
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


class ProxyPort(Section):
    """A port forwarded by the master."""

    proxy_port: Integer
    proxy_tcp: bool = False
    unauthenticated: bool = False
    default_service_id: bool = False


class RegistryAuth(Section):
    """How to log in to an image registry."""

    place: ClassVar[KeyPath] = ("environment", "registry_auth")

    username: str | None = None
    password: str | None = None
    auth: str | None = None
    email: str | None = None
    serveraddress: str | None = None
    identitytoken: str | None = None
    registrytoken: str | None = None


class Environment(Section):
    """The environment of a trial: variables and containers."""

    place: ClassVar[KeyPath] = ("environment",)

    environment_variables: Annotated[EnvironmentVariables, BeforeValidator(_same_variables)] = EnvironmentVariables()
    image: Annotated[Images, BeforeValidator(_same_image)] = Images()
    force_pull_image: bool = False
    registry_auth: RegistryAuth | None = None
    add_capabilities: list[str] = []
    drop_capabilities: list[str] = []
    pod_spec: dict[str, Any] | None = None
    ports: dict[str, Integer] = {}
    proxy_ports: list[ProxyPort] = []


class Slurm(Section):
    """Options for Slurm."""

    slots_per_node: Positive | None = None
    gpu_type: str | None = None
    sbatch_args: list[str] = []


class Pbs(Section):
    """Options for PBS."""

    slots_per_node: Positive | None = None
    pbsbatch_args: list[str] = []
