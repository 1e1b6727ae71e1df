# The server with the demo model, built by the same steps as deploy/quickstart.sh.
#   docker build -t saccade .                                   (or --build-arg BASE=ubuntu:24.04)
#   docker run --rm -p 127.0.0.1:50051:50051 -p 127.0.0.1:9090:9090 saccade
# Learned step times are kept in /var/lib/saccade: -v saccade:/var/lib/saccade has them again after the container's end.
# Another model: -v /path/to/config:/config saccade serve --config /config/server.yaml
ARG BASE=debian:12-slim

FROM ${BASE} AS build
WORKDIR /src
COPY deploy/setup.sh deploy/setup.sh
RUN deploy/setup.sh build
COPY . .
RUN cmake --preset release -DSACCADE_BUILD_TESTS=OFF \
    && cmake --build build/release --target saccade-server \
    && cmake --install build/release --prefix /opt/saccade --strip \
    && deploy/setup.sh libraries-of /opt/saccade/bin/saccade-server >build/packages.txt

FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY --from=build /src/deploy/setup.sh /src/build/packages.txt /tmp/
RUN xargs /tmp/setup.sh install </tmp/packages.txt \
    && rm -rf /tmp/setup.sh /tmp/packages.txt /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin saccade \
    && install -d -o 10001 -m 0700 /var/lib/saccade
COPY --from=build /opt/saccade /opt/saccade
USER 10001
EXPOSE 50051 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["/opt/saccade/bin/saccade-server", "health", "--address", "127.0.0.1:50051"]
ENTRYPOINT ["/opt/saccade/bin/saccade-server"]
CMD ["serve", "--config", "/opt/saccade/share/saccade/config/container.yaml"]
