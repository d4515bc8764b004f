"""Pictures, a page and the command line of pipelines.

command        python -m tpfuse pipeline
gantt          a picture
page           a page of HTML that runs the clock itself
timeline.html  its script and looks
"""
