"""Corrects what a trace does differently from eager, so that a planned step has eager's bits.

`corrections.py` applies all of these, in this order:

- around dynamo's trace: Hugging Face decoders make S × S masks where eager's attention is causal;
- `masks`, around dynamo's trace: masks of the same models that are known to mask nothing;
- `layouts`, around every trace: fake kernels describe results with other strides than kernels give;
- `functions`, in dynamo's graph: eager chooses some backwards by the data, a trace cannot, and asks
  for singular vectors only where a backward wants them; and autocast rounds inside some;
- `casts`, while the joint graph is traced: autocast casts a parameter once, and nothing in the
  backward;
- `updates`, while the joint graph is traced: draws and updates in place that change strides;
  afterwards, in the joint graph, two backwards get their own names back;
- `results`, in the joint graph: dtypes of statistics on the CPU, and LSTMs that need grad mode;
- `dropout`, in the joint graph: CUDA's dropout in place of the CPU's.

`memopt.torch_private.whole_kernels` also keeps torch from taking operators apart in Python.
"""
