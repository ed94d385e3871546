//! Test cases of the chart: values, with texts that the manifests must or must not contain, and values that must be refused.

use anyhow::{Result, bail};

use super::helm::Helm;

const HOST: &str = "apiServer.host=192.0.2.1";

/// Values, and the texts that the manifests must contain (`holds`) and must not contain (`lacks`).
struct Case {
    values: &'static [&'static str],
    holds: &'static [&'static str],
    lacks: &'static [&'static str],
}

const CASES: [Case; 19] = [
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
        holds: &["KUBERNETES_SERVICE_PORT: \"443\"", "clusterCIDR: 10.0.0.0/8", "containerPort: 20256"],
        // All nodes share one ConfigMap, so it has no node's name.
        lacks: &["hostnameOverride", "containerPort: 10256"],
    },
    Case {
        values: &[
            HOST,
            "socketLb=host-only",
            "socketDrop=fail",
            "forwardingMode=hybrid",
            "ejection=off",
            "slowStart=30s",
            "page=services",
        ],
        holds: &[
            "value: \"host-only\"",
            "value: \"fail\"",
            "value: \"hybrid\"",
            "value: \"off\"",
            "value: \"30s\"",
            "value: \"services\"",
        ],
        lacks: &["value: \"all\"", "value: \"silent\"", "value: \"snat\""],
    },
    Case {
        values: &["apiServer.configMap=elsewhere"],
        holds: &["name: elsewhere"],
        lacks: &["KUBERNETES_SERVICE_HOST", "BALLAST_MASTER"],
    },
    Case {
        values: &[HOST, "settings.BALLAST_MAX_FLOWS=5000", "paths.cgroupRoot=/sys/fs/cgroup/unified"],
        holds: &["name: BALLAST_MAX_FLOWS\n              value: \"5000\"", "name: BALLAST_CGROUP_ROOT"],
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
            "maxUnavailable=1",
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
        values: &[HOST, "resources.requests.cpu=50m", "resources.limits.cpu=2"],
        holds: &[
            "requests:\n              cpu: 50m\n              memory: 64Mi",
            "limits:\n              cpu: 2\n",
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
            "monitoring.alerts=true",
            "monitoring.dashboard=true",
            "monitoring.labels.release=prometheus",
            "config.metricsBindAddress=0.0.0.0:10249",
        ],
        holds: &[
            "kind: PodMonitor",
            "kind: PrometheusRule",
            "alert: BallastAbsent",
            "ballast.json:",
            "release: prometheus",
        ],
        lacks: &[],
    },
    Case {
        values: &["cleanup=true", "endUdpSockets=true"],
        holds: &["name: ballast-cleanup", "args: [cleanup, --stay]"],
        lacks: &["--init-only", "kind: ClusterRole", "kind: ConfigMap", "end-udp-sockets"],
    },
];

const DIGEST: &str = "image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// Values that must be refused, and a part of the error.
const REFUSED: [(&[&str], &str); 14] = [
    (&[], "apiServer.host or apiServer.hosts is needed"),
    (&[HOST, "apiServer.hosts={192.0.2.2}"], "are both set"),
    (&["apiServer.hosts={https://192.0.2.1}"], "hosts"),
    (&[HOST, "manifests=relative"], "manifests"),
    (&["apiServer.host=https://192.0.2.1:6443"], "apiServer"),
    (&[HOST, "apiServer.port=70000"], "port"),
    (&[HOST, "nonsense=1"], "nonsense"),
    (&[HOST, "image.digest=sha256:short"], "digest"),
    (&[HOST, "settings.MAX_FLOWS=1"], "MAX_FLOWS"),
    (&[HOST, "maxUnavailable=0"], "maxUnavailable"),
    (&[HOST, "check=perhaps"], "check"),
    (&[HOST, "page=everything"], "page"),
    (&[HOST, "seccompProfile.type=Nonsense"], "seccompProfile"),
    (&[HOST, "monitoring.podMonitor=true"], "config.metricsBindAddress"),
];

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
    for (values, reason) in REFUSED {
        match helm.render(values) {
            Ok(_) => bail!("the chart accepts the invalid values {values:?}"),
            Err(error) if error.to_string().contains(reason) => {}
            Err(error) => bail!("the chart refuses {values:?}, but not because of {reason}: {error:#}"),
        }
    }
    Ok(())
}
