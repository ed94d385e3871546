//! Converts the flags of `ballast run` to the options from which the agent's settings are made.

use super::RunArgs;
use crate::config::Options;

impl From<RunArgs> for Options {
    fn from(args: RunArgs) -> Self {
        Self {
            config: args.config,
            kubeconfig: args.kubeconfig,
            master: args.master,
            manifests: args.manifests,
            hostname_override: args.hostname_override,
            cgroup_root: args.cgroup_root,
            bpffs: args.bpffs,
            bind_address: args.bind_address,
            devices: args.devices,
            packet_hook: args.packet_hook,
            paths: args.paths,
            network: args.network,
            healthz_bind_address: args.healthz_bind_address,
            metrics_bind_address: args.metrics_bind_address,
            page: args.page,
            otlp: args.otlp,
            log_format: args.log_format,
            log_level: args.log_level,
            sizes: args.sizes.into(),
            timeouts: args.timeouts.into(),
            min_sync_period: args.min_sync_period,
            sync_period: args.sync_period,
            api_audit_period: args.api_audit_period,
            proxy_mode: args.proxy_mode,
            kube_proxy: args.kube_proxy.values,
        }
    }
}
