"""`equivit.train` with the hash of every batch written down, and a signal to itself before a given one.

python -m tests.training.run_driver HASHES SIGNAL BATCH [arguments of equivit.train]

The process whose number is in UNREADABLE, such as 1:6, cannot read that checkpoint.
"""

import functools
import hashlib
import os
import sys

if __name__ == "__main__":  # workers import this module too, and need no JAX
    import jax
    from jax._src import compiler, distributed

    jax.config.update("jax_platforms", "cpu")
    from equivit import train
    from equivit.training import sharding
    from equivit.training.run import checkpoint_files, processes

    path, number, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Processes wait for each other as long as a slow machine takes; where one is to be killed, the others notice it.
    patience = dict(initialization_timeout=3600, shutdown_timeout_seconds=3600)
    jax.distributed.initialize = functools.partial(jax.distributed.initialize, **patience)
    if not number:
        processes.HEARTBEAT_SECONDS = 3600
    # JAX lets only process 0 write to the compilation cache, but the second process compiles other programs.
    write, everyone = compiler._cache_write, distributed.global_state

    def written(*arguments):
        number, everyone.process_id = everyone.process_id, 0
        write(*arguments)
        everyone.process_id = number

    compiler._cache_write = written
    seen, to_global = [], sharding.to_global

    def watched(mesh, batch):
        if "weight" not in batch:  # a training batch
            digest = hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()
            with open(path, "a") as file:
                file.write(digest + "\n")
            seen.append(digest)
            if len(seen) == stop:
                os.kill(os.getpid(), number)
        return to_global(mesh, batch)

    read = checkpoint_files._read

    def damaged(manager, step, parts):
        if os.environ.get("UNREADABLE") == f"{jax.process_index()}:{step}":
            raise ValueError("damaged here")
        return read(manager, step, parts)

    sharding.to_global, checkpoint_files._read = watched, damaged
    sys.exit(train.main(sys.argv[4:]))
