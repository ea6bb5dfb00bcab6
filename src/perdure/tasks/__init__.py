"""Steps and effects inside a task of another framework. A run stands for the task and holds what its calls record.

`policy` is how such calls find their records, wait and ask; `approvals` how they ask people; `executions` the tasks of
this process; `rows` their rows. Adapters use `perdure.adapters`; nothing in `runs/` knows of tasks' code.
"""
