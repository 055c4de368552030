"""A standing attack on everything that reads files.

The property: whatever is in a file, its reader returns a value, or raises one ValueError or OSError whose message is
one line that names the file.  It raises nothing else, floods nothing with warnings, takes at most 5 s of processor time
and 500 MB, starts no process, touches no other file, and leaves the process as it was.

- `attack.py` checks the property: it gives each input to a child process, which may die.  `hunt.py` looks for faults
  and reduces them; `__main__.py` is the command; `harness.py` tests all this.
- `watch.py` notices what a process does and what changes in it.
- `mutations.py` and `zips.py` damage bytes, JSON, lines, archives and arrays, and keep their structure.
- The other modules hold the readers, one module a family.

To add a reader: make a `Reader` in the module of its family, from valid files and a strategy of damaged ones, and add
it to the READERS of that module; `__main__.py` lists the modules.
"""
