"""A model of Triton's Python backend that announces each batch."""

import triton_python_backend_utils as pb_utils

import gpreempt


class TritonPythonModel:
    def initialize(self, args):
        # The GPU of this instance, as a HIP index: instance_group in config.pbtxt assigns it.
        self.online = gpreempt.online(gpus=[int(args["model_instance_device_id"])], label="triton " + args["model_name"])

    def execute(self, requests):
        with self.online:
            return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("ANSWER", text)])  # instead of your GPU work
