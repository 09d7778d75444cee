"""GPUs, asked of their driver."""

from __future__ import annotations

from ncclep_bench.doctor.machine import AbsentError, Machine, Reader, Reading, printed_by


def says(what: str) -> Reader:
    """What a function of `live_gpus` makes of the driver's answers."""

    def read(machine: Machine) -> Reading:
        import msgspec

        from ncclep_bench.doctor import live_gpus

        if not machine.driver.gpus and what != "unreadable":
            raise AbsentError("the driver shows no GPU that answers", live_gpus.SOURCE)
        return Reading(msgspec.to_builtins(getattr(live_gpus, what)(machine.driver)), live_gpus.SOURCE)

    return read


def about_links(of: str) -> Reader:
    def read(machine: Machine) -> Reading:
        from ncclep_bench.runtime.nvml import Missing

        reading = says(of)(machine)
        if not reading.value:
            links = machine.driver.gpus[0].links
            reason, state = (
                (links.reason, links.state) if isinstance(links, Missing) else ("no link tells it", "absent")
            )
            raise AbsentError(f"NVLink: {reason}", reading.source, state)
        return reading

    return read


def processes(machine: Machine) -> Reading:
    from ncclep_bench.runtime.nvml import Missing

    reading = says("processes")(machine)
    for gpu in machine.driver.gpus:
        if isinstance(gpu.processes, Missing):
            raise AbsentError(f"GPU {gpu.index}: {gpu.processes.reason}", reading.source, gpu.processes.state)
        if any(held.used_bytes is None for held in gpu.processes):
            raise AbsentError(f"GPU {gpu.index}: the driver does not tell the memory of processes", reading.source)
    return reading


def unreadable(machine: Machine) -> Reading:
    try:
        return says("unreadable")(machine)
    except AbsentError as error:
        if error.state != "failed":
            raise
        return Reading([{"at": f"{error.source}:0", "device": "the NVIDIA driver", "said": str(error)}], error.source)


def topology(machine: Machine) -> Reading:
    """With adapters where nvidia-smi is there to tell; a driver that does not answer is not asked again."""
    reading = says("topology")(machine)
    try:
        return printed_by(["nvidia-smi", "topo", "-m"], "topology", "gpus.topology")(machine)
    except AbsentError:
        if not reading.value:
            raise AbsentError("the driver does not tell how its GPUs are linked", reading.source, "failed") from None
        return reading


def cuda(machine: Machine) -> Reading:
    if not machine.driver.cuda:
        raise AbsentError("the driver does not tell its CUDA version", "NVML")
    return Reading(machine.driver.cuda, f"NVML, driver {machine.driver.version}")


def boards(machine: Machine) -> Reading:
    """What /proc tells of each GPU: a captured folder has nothing else."""
    folder = "/proc/driver/nvidia/gpus"
    found = []
    for name in machine.names(folder):
        rows = (line.partition(":") for line in machine.words(f"{folder}/{name}/information").splitlines())
        about = {key.strip().lower(): value.strip() for key, colon, value in rows if colon}
        found.append({"bus_id": name, **{key: about.get(key, "") for key in ("model", "gpu uuid", "gpu firmware")}})
    return Reading(found, folder)
