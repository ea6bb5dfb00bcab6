"""Steps and effects inside a task of another framework. A run represents the task and holds the records of its calls.

`policy` decides how such calls find their records, wait and ask. `approvals` asks people. `executions` holds the tasks
of this process, `rows` their rows. `resuming` resumes threads whose questions were answered, `undoing` undoes their
effects, and `handle` is what adapters hold. Adapters use `perdure.adapters`; `runs/` never imports this package.
"""
