"""The bits of a model over layouts of its ranks: which are equal, and the first op whose are not.

command     python -m tpfuse bits
difference  how many elements differ, by how many units in the last place
layouts     steps of training at several layouts, each against one process
trace       the tensors of a forward and a backward, in the order of execution
whole       joins the slices that ranks hold
"""
