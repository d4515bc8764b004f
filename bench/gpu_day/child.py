"""A process that does jobs of one part: python -m bench.gpu_day.child SPEC EVENTS, as children.py starts it."""

import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback

from bench.gpu_day.children import FRESH
from bench.gpu_day.part import Absent, Context, Part


def leave_with(parent: int) -> None:
    """Ends this process's group once its parent is gone, so that nothing is left on the GPU."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def described(error: BaseException) -> str:
    """The error in one line, with the place in this repository that it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    place = f" ({pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:1000]}{place}"


def usable(context: Context) -> bool:
    """Returns False if the GPU no longer answers: an illegal access leaves a context in which everything fails.  Frees
    the cached memory of the job before."""
    torch = sys.modules.get("torch")
    if torch is None or context.tiny or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def do(part: Part, jobs: list[str], context: Context, say) -> int:
    """Runs the jobs; returns FRESH where the process must not be used for the next one."""
    for job in jobs:
        say(job=job, event="begin", time=time.time())
        print(f"---- {part.name}: {job}", flush=True)
        error = ""
        try:
            part.run(job, context_of(context, job, say))
        except Absent as absent:
            say(job=job, row=dict(left_out=str(absent)))
        except (Exception, SystemExit) as raised:
            traceback.print_exc()
            error = described(raised)
        say(job=job, event="end", time=time.time(), error=error)
        if not usable(context):
            return FRESH
    return 0


def context_of(context: Context, job: str, say) -> Context:
    return Context(context.tiny, context.scratch, context.known_rows, lambda row: say(job=job, row=row), context.until)


def main(argv: list[str]) -> int:
    leave_with(os.getppid())
    spec = json.loads(pathlib.Path(argv[0]).read_text())
    if spec["rehearse"]:
        from bench.gpu_day import rehearsal

        rehearsal.install(spec["part"]["module"])
    part = Part(**spec["part"])
    context = Context(spec["rehearse"], pathlib.Path(spec["scratch"]), spec["rows"], print, spec["until"])
    with open(argv[1], "a") as events:

        def say(**event) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        return do(part, spec["jobs"], context, say)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
