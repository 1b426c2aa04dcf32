# The official LLaMA-Factory Ascend image plus this plugin; nothing that the image has is changed.
#   docker build --build-arg BASE_IMAGE=IMAGE -t llamafactory-ascend .
ARG BASE_IMAGE=hiyouga/llamafactory:latest-cann9.0.0-torch_npu2.7.1-A2-ubuntu-py3.11

FROM ${BASE_IMAGE} AS wheel
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${BASE_IMAGE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
COPY --from=wheel /wheels /wheels
# What the image has becomes pip's constraint, so pip adds what is missing or the build fails; then the two lists
# are compared. Packages of the image that come from a folder cannot be constraints (pip freeze shows a path).
RUN pip freeze | grep -E '^[^ ]+==' > /wheels/before.txt; \
    pip install --no-cache-dir --constraint /wheels/before.txt /wheels/*.whl; \
    pip freeze > /wheels/after.txt; \
    if grep -vxFf /wheels/after.txt /wheels/before.txt; then echo 'these would change' >&2; exit 1; fi; \
    rm -r /wheels
