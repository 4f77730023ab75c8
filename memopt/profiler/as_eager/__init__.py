"""What a trace does otherwise than eager, set right, so that a planned step has eager's bits.

`corrections.py` applies all of these, in this order:

- `packed_positions`, around dynamo's trace: Hugging Face decoders make S × S masks where eager's
  attention is causal.
- `layouts`, around every trace: fake kernels describe results with other strides than kernels give.
- `vectors`, in dynamo's graph: singular values and eigenvalues that need no gradient are asked for
  with their vectors.
- `backward`, in dynamo's graph: eager chooses some backwards by the data, a trace cannot.
- `draws`, while the joint graph is traced: random numbers are drawn into a copy that is laid out
  otherwise; afterwards, in the joint graph, two backwards get their own names back.
- `updates`, while the joint graph is traced: an update in place becomes one that changes strides.
- `results`, in the joint graph: dtypes of statistics on the CPU, and LSTMs that need grad mode.
- `dropout`, in the joint graph: CUDA's dropout in place of the CPU's.

Beside these `memopt.profiler.torch_private` keeps torch from taking operators apart in Python.
"""
