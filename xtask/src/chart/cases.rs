//! Test cases of the chart: values, with texts that the manifests must or must not contain, and values that must be refused.

use std::fs;

use anyhow::{Context as _, Result, bail, ensure};

use super::helm::Helm;
use crate::docs;

const HOST: &str = "apiServer.host=192.0.2.1";

/// Values, and the texts that the manifests must contain (`holds`) and must not contain (`lacks`).
struct Case {
    values: &'static [&'static str],
    holds: &'static [&'static str],
    lacks: &'static [&'static str],
}

const CASES: [Case; 30] = [
    Case {
        values: &[HOST, "paths.propagate=false", "endUdpSockets=true"],
        holds: &["mountPath: /sys/fs/bpf"],
        lacks: &["mountPropagation"],
    },
    Case {
        values: &[HOST, "preset=small", "maxFlows=50000", "settings.BALLAST_MAX_SLOTS=1000"],
        holds: &[
            "name: BALLAST_MAX_BACKENDS\n              value: \"16384\"",
            "name: BALLAST_MAX_FLOWS\n              value: \"50000\"",
            "name: BALLAST_MAX_SLOTS\n              value: \"1000\"",
        ],
        lacks: &["\"32768\""],
    },
    Case {
        values: &[HOST],
        holds: &[
            "KUBERNETES_SERVICE_HOST: \"192.0.2.1\"",
            "KUBERNETES_SERVICE_PORT: \"6443\"",
            "BALLAST_MASTER: \"https://192.0.2.1:6443\"",
            "image: localhost/ballast:",
            "- NET_ADMIN",
            "- BPF",
            "- PERFMON",
            "port: 10256\n",
            "hostPort: 10249\n",
            "type: RuntimeDefault",
            "kind: KubeProxyConfiguration",
            "args: [check, --pre, --report-only]",
        ],
        lacks: &[
            "- SYS_ADMIN",
            "- SYS_PTRACE",
            "hostPID",
            "PodMonitor",
            "PrometheusRule",
            "ballast-cleanup",
            "BALLAST_CGROUP_ROOT",
            "BALLAST_MANIFESTS",
            "BALLAST_OTLP",
            "containerPort: 10256",
            "hostPort: 10256",
            "<no value>",
        ],
    },
    Case {
        values: &[
            HOST,
            "otlp.endpoint=http://$(HOST_IP):4318",
            "otlp.signals={traces,logs}",
            "otlp.sample=100",
            "otlp.environment.OTEL_SERVICE_NAME=proxy",
            "otlp.secret=telemetry",
        ],
        holds: &[
            "name: HOST_IP",
            "value: \"http://$(HOST_IP):4318\"",
            "value: \"traces,logs\"",
            "value: \"100\"",
            "name: OTEL_SERVICE_NAME",
            "- secretRef:\n                name: telemetry",
        ],
        lacks: &[],
    },
    // As a parent chart passes them to a dependency with a condition.
    Case { values: &[HOST, "enabled=true", "global.a=b"], holds: &["kind: DaemonSet"], lacks: &["global"] },
    Case {
        values: &[HOST, "check=false"],
        holds: &["args: [run, --init-only"],
        lacks: &["name: check", "--pre"],
    },
    Case {
        values: &[HOST, "endUdpSockets=true"],
        holds: &[
            "name: ballast-end-udp-sockets",
            "args: [end-udp-sockets]",
            "hostPID: true",
            "- SYS_ADMIN",
            "- SYS_PTRACE",
            "- BPF",
        ],
        lacks: &[],
    },
    Case {
        values: &["apiServer.hosts={192.0.2.1,api.example,2001:db8::1}"],
        holds: &[
            "KUBERNETES_SERVICE_HOST: \"192.0.2.1\"",
            "BALLAST_MASTER: \"https://192.0.2.1:6443,https://api.example:6443,https://[2001:db8::1]:6443\"",
        ],
        lacks: &[],
    },
    Case {
        values: &[
            HOST,
            "seccompProfile.type=Localhost",
            "seccompProfile.localhostProfile=ballast.json",
            "appArmorProfile.type=Localhost",
            "appArmorProfile.localhostProfile=ballast",
        ],
        holds: &["localhostProfile: ballast.json\n", "localhostProfile: ballast\n"],
        lacks: &["type: RuntimeDefault"],
    },
    Case {
        values: &[HOST, "manifests=/etc/ballast/manifests"],
        holds: &[
            "name: BALLAST_MANIFESTS\n              value: \"/etc/ballast/manifests\"",
            "mountPath: \"/etc/ballast/manifests\"",
            "path: \"/etc/ballast/manifests\"",
        ],
        lacks: &[],
    },
    Case {
        values: &[
            "apiServer.host=api.example",
            "apiServer.port=443",
            "config.clusterCIDR=10.0.0.0/8",
            "config.hostnameOverride=x",
            "config.healthzBindAddress=0.0.0.0:20256",
        ],
        holds: &["KUBERNETES_SERVICE_PORT: \"443\"", "clusterCIDR: 10.0.0.0/8", "port: 20256\n"],
        // All nodes share one ConfigMap, so it has no node's name.
        lacks: &["hostnameOverride", "port: 10256\n"],
    },
    Case {
        values: &[
            HOST,
            "socketLb=host-only",
            "socketDrop=fail",
            "nodePortBind=refuse",
            "forwardingMode=hybrid",
            "ejection=off",
            "tenantAnnotations={weights}",
            "slowStart=30s",
            "page=services",
        ],
        holds: &[],
        lacks: &["value: all\n", "value: silent", "value: allow", "value: snat"],
    },
    Case {
        values: &[
            HOST,
            "logLevel=debug",
            "algorithm=wlc",
            "maxFlows=2000000",
            "uplinks=eth*",
            "xdp=off",
            "extraArgs={--v=4,--oom-score-adj=-998}",
            "extraEnv[0].name=GODEBUG",
            "extraEnv[0].value=x",
        ],
        holds: &[
            "- --config=/etc/ballast/config.yaml\n            - --v=4\n            - --oom-score-adj=-998",
            "- name: GODEBUG\n              value: x",
        ],
        lacks: &[],
    },
    Case {
        values: &[HOST, "config.healthzBindAddress=127.0.0.1:20256"],
        holds: &[
            "path: /livez\n              host: \"127.0.0.1\"\n              port: 20256\n",
            "path: /readyz\n              host: \"127.0.0.1\"\n              port: 20256\n",
        ],
        lacks: &["path: /livez\n              port", "path: /readyz\n              port"],
    },
    Case {
        values: &[HOST, "config.healthzBindAddress=[::1]:20256"],
        holds: &["path: /livez\n              host: \"::1\"\n              port: 20256\n"],
        lacks: &["path: /livez\n              port", "path: /readyz\n              port"],
    },
    Case {
        values: &[HOST, "config.healthzBindAddress=[::]:20256"],
        holds: &["path: /livez\n              port: 20256\n", "path: /readyz\n              port: 20256\n"],
        lacks: &["  host:"],
    },
    // As kubeadm writes it.
    Case {
        values: &[
            HOST,
            "config.healthzBindAddress=",
            "config.metricsBindAddress=",
            "config.clientConnection.kubeconfig=/var/lib/kube-proxy/kubeconfig.conf",
            "config.clientConnection.qps=0",
        ],
        holds: &["port: 10256\n", "containerPort: 10249", "healthzBindAddress: \"\"", "qps: 0"],
        lacks: &["kubeconfig.conf"],
    },
    Case {
        values: &[
            HOST,
            "fullnameOverride=proxy",
            "commonLabels.team=net",
            "serviceAccount.name=agent",
            "rbac.create=false",
            "endUdpSockets=true",
            "updateStrategy.type=OnDelete",
        ],
        holds: &[
            "name: proxy\n",
            "name: proxy-api-server\n",
            "name: proxy-end-udp-sockets\n",
            "    team: net\n",
            "serviceAccountName: agent\n",
            "type: OnDelete\n",
        ],
        lacks: &["kind: ClusterRole", "  name: ballast\n"],
    },
    Case {
        values: &[HOST, "serviceAccount.create=false", "serviceAccount.name=given"],
        holds: &["serviceAccountName: given\n", "subjects:\n  - kind: ServiceAccount\n    name: given\n"],
        lacks: &["kind: ServiceAccount\nmetadata"],
    },
    Case {
        values: &[HOST, "serviceAccount.name=agent"],
        holds: &[
            "kind: ServiceAccount\nmetadata:\n  name: agent\n",
            "serviceAccountName: agent\n",
            "subjects:\n  - kind: ServiceAccount\n    name: agent\n",
        ],
        lacks: &[],
    },
    Case {
        values: &["apiServer.configMap=elsewhere"],
        holds: &["name: elsewhere"],
        lacks: &["KUBERNETES_SERVICE_HOST", "BALLAST_MASTER"],
    },
    Case {
        values: &[HOST, "settings.BALLAST_MAX_SLOTS=5000", "paths.cgroupRoot=/sys/fs/cgroup/unified"],
        holds: &["name: BALLAST_MAX_SLOTS\n              value: \"5000\"", "name: BALLAST_CGROUP_ROOT"],
        lacks: &[],
    },
    Case {
        values: &[
            HOST,
            "image.repository=registry.example/ballast",
            "image.tag=v9",
            "image.pullPolicy=Always",
            "imagePullSecrets[0].name=registry",
        ],
        holds: &[
            "image: registry.example/ballast:v9",
            "imagePullPolicy: Always",
            "imagePullSecrets:\n        - name: registry",
        ],
        lacks: &["localhost/ballast", "imagePullPolicy: IfNotPresent"],
    },
    Case {
        values: &[
            HOST,
            "nodeSelector.disk=ssd",
            "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchFields[0].key=metadata.name",
            "tolerations[0].key=only",
            "priorityClassName=system-cluster-critical",
            "updateStrategy.rollingUpdate.maxUnavailable=1",
        ],
        holds: &[
            "nodeSelector:\n        disk: ssd\n        kubernetes.io/os: linux",
            "- key: metadata.name",
            "tolerations:\n        - key: only",
            "priorityClassName: system-cluster-critical",
            "maxUnavailable: 1\n",
        ],
        lacks: &["operator: Exists", "system-node-critical", "10%"],
    },
    Case {
        values: &[
            HOST,
            "podAnnotations.team=net",
            "podLabels.tier=proxy",
            "serviceAccount.annotations.role=reader",
            "seLinuxOptions.type=ballast_t",
        ],
        holds: &[
            "        team: net\n",
            "        tier: proxy\n",
            "  annotations:\n    role: reader",
            "type: ballast_t",
        ],
        lacks: &["spc_t"],
    },
    Case {
        values: &[
            HOST,
            "resources.requests.cpu=50m",
            "resources.limits.cpu=2",
            "initResources.limits.cpu=3",
            "initResources.requests.cpu=7m",
            "endUdpSockets=true",
            "endUdpSocketsResources.limits.cpu=4",
            "endUdpSocketsResources.requests.cpu=8m",
        ],
        holds: &[
            "requests:\n              cpu: 50m\n              memory: 72Mi",
            "limits:\n              cpu: 2\n",
            "limits:\n              cpu: 3\n",
            "limits:\n              cpu: 4\n",
            "cpu: 7m\n",
            "cpu: 8m\n",
        ],
        lacks: &[],
    },
    Case {
        values: &[HOST, "paths.bpffs=/mnt/bpf", "paths.cgroup=/run/ballast/cgroup2"],
        holds: &[
            "value: /mnt/bpf\n",
            "mountPath: /mnt/bpf\n",
            "path: /mnt/bpf\n",
            "mountPath: /run/ballast/cgroup2\n",
            "path: /run/ballast/cgroup2\n",
        ],
        lacks: &[": /sys/fs/"],
    },
    Case {
        values: &[HOST, DIGEST],
        holds: &["image: localhost/ballast@sha256:0123456789abcdef"],
        lacks: &["image: localhost/ballast:"],
    },
    Case {
        values: &[
            HOST,
            "monitoring.podMonitor=true",
            "monitoring.serviceMonitor=true",
            "monitoring.alerts=true",
            "monitoring.dashboard=true",
            "monitoring.labels.release=prometheus",
            "config.metricsBindAddress=0.0.0.0:10249",
        ],
        holds: &[
            "name: BALLAST_METRICS_BIND_ADDRESS\n              value: \"0.0.0.0:10249\"",
            "kind: PodMonitor",
            "podMetricsEndpoints:\n    - port: metrics\n      honorLabels: true",
            "kind: ServiceMonitor",
            "  endpoints:\n    - port: metrics\n      honorLabels: true",
            "name: ballast-metrics",
            "kind: PrometheusRule",
            "alert: BallastAbsent",
            "ballast.json:",
            "release: prometheus",
        ],
        lacks: &[],
    },
    Case {
        values: &[
            "cleanup=true",
            "endUdpSockets=true",
            "cleanupResources.limits.cpu=5",
            "cleanupResources.requests.cpu=9m",
        ],
        holds: &[
            "name: ballast-cleanup",
            "args: [cleanup, --stay]",
            "limits:\n              cpu: 5\n",
            "cpu: 9m\n",
        ],
        lacks: &["--init-only", "kind: ClusterRole", "kind: ConfigMap", "end-udp-sockets"],
    },
];

const DIGEST: &str = "image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// Values that must be refused, and a part of the error.
const REFUSED: [(&[&str], &str); 26] = [
    (&[], "apiServer.host or apiServer.hosts is needed"),
    (&[HOST, "apiServer.hosts={192.0.2.2}"], "are both set"),
    (&["apiServer.hosts={https://192.0.2.1}"], "hosts"),
    (&[HOST, "manifests=relative"], "manifests"),
    (&["apiServer.host=https://192.0.2.1:6443"], "apiServer"),
    (&["apiServer.host=192.0.2.10:6443"], "host"),
    (&["apiServer.host=cp.example:6443"], "host"),
    (&["apiServer.hosts={192.0.2.10,cp.example:6443}"], "hosts"),
    (&[HOST, "apiServer.port=70000"], "port"),
    (&[HOST, "nonsense=1"], "nonsense"),
    (&[HOST, "image.digest=sha256:short"], "digest"),
    (&[HOST, DIGEST, "image.tag=v9"], "are both set"),
    (&[HOST, "settings.MAX_FLOWS=1"], "MAX_FLOWS"),
    (&[HOST, "settings.BALLAST_MAX_FLOW=1"], "BALLAST_MAX_FLOW"),
    (&[HOST, "settings.BALLAST_MAX_FLOWS=1"], "BALLAST_MAX_FLOWS"),
    (&[HOST, "settings.BALLAST_PROXY_MODE=ipvs"], "BALLAST_PROXY_MODE"),
    (&[HOST, "serviceAccount.create=false"], "serviceAccount.name is needed"),
    (&[HOST, "updateStrategy.type=Sometimes"], "updateStrategy"),
    (&[HOST, "check=perhaps"], "check"),
    (&[HOST, "enabled=perhaps"], "enabled"),
    (&[HOST, "page=everything"], "page"),
    (&[HOST, "preset=large"], "preset"),
    (&[HOST, "seccompProfile.type=Nonsense"], "seccompProfile"),
    (&[HOST, "monitoring.podMonitor=true"], "config.metricsBindAddress"),
    (
        &[HOST, "monitoring.podMonitor=true", "config.metricsBindAddress=127.0.0.1:10249"],
        "config.metricsBindAddress",
    ),
    (
        &[HOST, "monitoring.serviceMonitor=true", "config.metricsBindAddress=[::1]:10249"],
        "config.metricsBindAddress",
    ),
];

/// Values that become variables of the agent's container, and the lines of the variables. In another container, they would
/// have no effect.
const VARIABLES: [(&str, &str, &str); 11] = [
    ("socketLb=host-only", "BALLAST_SOCKET_LB", "host-only"),
    ("socketDrop=fail", "BALLAST_SOCKET_DROP", "fail"),
    ("forwardingMode=hybrid", "BALLAST_FORWARDING_MODE", "hybrid"),
    ("ejection=off", "BALLAST_EJECTION", "\"off\""),
    ("slowStart=30s", "BALLAST_SLOW_START", "30s"),
    ("page=services", "BALLAST_PAGE", "services"),
    ("logLevel=debug", "BALLAST_LOG_LEVEL", "debug"),
    ("algorithm=wlc", "BALLAST_ALGORITHM", "wlc"),
    ("maxFlows=2000000", "BALLAST_MAX_FLOWS", "\"2000000\""),
    ("uplinks=eth*", "BALLAST_UPLINKS", "eth*"),
    ("xdp=off", "BALLAST_XDP", "\"off\""),
];

/// Checks that each of [`VARIABLES`] reaches the agent's container, and only this one.
fn variables_reach_the_agent(helm: &Helm) -> Result<()> {
    let values: Vec<&str> = [HOST].into_iter().chain(VARIABLES.map(|(value, ..)| value)).collect();
    let text = helm.render_only(&["templates/daemonset.yaml"], &values)?;
    let Some((before, agent)) = text.split_once("\n        - name: ballast\n") else {
        bail!("the DaemonSet has no container `ballast`");
    };
    for (set, name, value) in VARIABLES {
        let lines = format!("- name: {name}\n              value: {value}\n");
        if !agent.contains(&lines) || before.contains(name) {
            bail!("{set} does not reach the container of the agent alone as `{lines}`");
        }
    }
    Ok(())
}

/// Checks that each selector and each set of labels names the release, so that one release never selects pods of another.
fn releases_are_told_apart(helm: &Helm) -> Result<()> {
    const NAME: &str = "app.kubernetes.io/name: ballast\n";
    let all = [
        HOST,
        "endUdpSockets=true",
        "monitoring.podMonitor=true",
        "monitoring.serviceMonitor=true",
        "config.metricsBindAddress=0.0.0.0:10249",
    ];
    for values in [&all[..], &["cleanup=true"]] {
        let text = helm.render_release("edge", values)?;
        ensure!(text.contains(&format!("matchLabels:\n      {NAME}")), "no selector names the chart");
        for after in text.split(NAME).skip(1) {
            let next = after.lines().next().unwrap_or_default().trim();
            ensure!(
                next == "app.kubernetes.io/instance: \"edge\"",
                "labels without the release, but with {next}"
            );
        }
    }
    Ok(())
}

/// Checks that the chart accepts the examples in the comments of values.yaml, and that each changes the manifests.
fn examples_are_accepted(helm: &Helm) -> Result<()> {
    let path = helm.chart().join("values.yaml");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let examples = docs::chart::examples(&text);
    ensure!(
        examples.iter().any(|one| one.starts_with("{settings: ")),
        "no example of settings: {examples:?}"
    );
    // Without an endpoint, the values below `otlp` have no effect.
    let others = [HOST, "otlp.endpoint=http://192.0.2.1:4318"];
    let without = helm.render(&others)?;
    for example in examples {
        let with = helm.render_file(&example, &others).with_context(|| format!("the example {example}"))?;
        ensure!(with != without, "the example {example} has no effect");
    }
    Ok(())
}

/// Returns the values of each case, in the syntax of `--set`.
pub(super) fn values() -> Vec<&'static [&'static str]> {
    CASES.iter().map(|case| case.values).collect()
}

/// Renders and checks every case.
pub(super) fn check(helm: &Helm) -> Result<()> {
    for case in &CASES {
        let text = helm.render(case.values)?;
        if let Some(part) = case.holds.iter().find(|part| !text.contains(**part)) {
            bail!("the chart with {:?} does not contain `{part}`", case.values);
        }
        if let Some(part) = case.lacks.iter().find(|part| text.contains(**part)) {
            bail!("the chart with {:?} holds `{part}`", case.values);
        }
    }
    variables_reach_the_agent(helm)?;
    releases_are_told_apart(helm)?;
    examples_are_accepted(helm)?;
    for (values, reason) in REFUSED {
        match helm.render(values) {
            Ok(_) => bail!("the chart accepts the invalid values {values:?}"),
            Err(error) if error.to_string().contains(reason) => {}
            Err(error) => bail!("the chart refuses {values:?}, but not because of {reason}: {error:#}"),
        }
    }
    Ok(())
}
