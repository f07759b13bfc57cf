"""Backend for TPUs and other devices of torch_xla."""
