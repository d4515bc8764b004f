"""Pictures and the command line of pipelines.

command  python -m tpfuse pipeline
gantt    a picture
"""
