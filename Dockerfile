# The sidecar's image. Two stages: the first has pip and builds a virtual environment, the last has only Python and it.
#
#   docker build -t tenure .
#   docker run --rm -v tenure-data:/var/lib/tenure -v tenure-socket:/run/tenure \
#     -e TENURE_NODE_ID=n1 -e TENURE_CLUSTER_ID=demo -e TENURE_PEERS=n1=127.0.0.1:7070 \
#     -e TENURE_INSECURE=true -e TENURE_BOOTSTRAP=true tenure
#
# Both stages must come from images with the same Python at the same path; any Debian-like base with Python 3.11+ does.
ARG BASE=python:3.11-slim
ARG BUILD_BASE=${BASE}

FROM ${BUILD_BASE} AS build
WORKDIR /src
RUN python3 -m venv /opt/tenure
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY clients/python /src/clients/python
COPY pyproject.toml README.md LICENSE /src/
COPY sidecar /src/sidecar
# The environment keeps no installer: nothing in the last stage can fetch or build code.
RUN /opt/tenure/bin/python -m pip install -q --use-pep517 /src/clients/python /src \
    && /opt/tenure/bin/python -m compileall -q /opt/tenure/lib \
    && rm -rf /opt/tenure/lib/python3*/site-packages/pip* /opt/tenure/lib/python3*/site-packages/setuptools* /opt/tenure/bin/pip*

FROM ${BASE}
ARG UID=10001
ARG GID=10001
RUN printf 'tenure:x:%s:%s::/var/lib/tenure:/usr/sbin/nologin\n' "$UID" "$GID" >> /etc/passwd \
    && printf 'tenure:x:%s:\n' "$GID" >> /etc/group \
    && mkdir -p /var/lib/tenure /run/tenure \
    && chown "$UID:$GID" /var/lib/tenure /run/tenure \
    && chmod 0700 /var/lib/tenure && chmod 0770 /run/tenure
COPY --from=build /opt/tenure /opt/tenure
ENV PATH=/opt/tenure/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    TENURE_DATA_DIR=/var/lib/tenure \
    TENURE_SOCKET=/run/tenure/tenure.sock \
    TENURE_HTTP_LISTEN=127.0.0.1:8321
USER ${UID}:${GID}
VOLUME ["/var/lib/tenure", "/run/tenure"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD ["tenure", "health"]
ENTRYPOINT ["tenure"]
CMD ["serve"]
