//! The settings from the command line and the environment, parsed; `None` or empty: not given.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::kube_proxy::Values;
use super::network::Network;
use super::otlp::OtlpOptions;
use super::page::PageSettings;
use super::paths::Paths;
use super::sizes::Sizes;
use crate::host::selection::DevicePattern;
use crate::programs::PacketHook;
use proxy_cli::value::{Listen, LogFormat, LogLevel, ProxyMode};
use proxy_core::model::settings::GivenFlowTimeouts;

/// The default time between two full comparisons.
pub const SYNC_PERIOD: Duration = Duration::from_secs(30);

/// The settings of `ballast run`, before kube-proxy's file is read. The fields are the flags with these names.
#[derive(Clone, Debug, Default)]
#[expect(missing_docs, reason = "the flags of these names have help texts")]
pub struct Options {
    pub config: Option<PathBuf>,
    pub kubeconfig: Option<PathBuf>,
    pub master: Vec<String>,
    pub manifests: Option<PathBuf>,
    pub hostname_override: Option<String>,
    pub cgroup_root: Option<PathBuf>,
    pub bpffs: PathBuf,
    pub bind_address: Option<IpAddr>,
    pub devices: Vec<DevicePattern>,
    pub packet_hook: PacketHook,
    pub paths: Paths,
    pub network: Network,
    pub healthz_bind_address: Option<Listen>,
    pub metrics_bind_address: Option<Listen>,
    pub page: PageSettings,
    pub otlp: OtlpOptions,
    pub log_format: Option<LogFormat>,
    pub log_level: Option<LogLevel>,
    pub sizes: Sizes,
    pub timeouts: GivenFlowTimeouts,
    pub min_sync_period: Option<Duration>,
    pub sync_period: Option<Duration>,
    pub api_audit_period: Duration,
    pub proxy_mode: Option<ProxyMode>,
    /// Flags of kube-proxy that Ballast does not have.
    pub kube_proxy: Values,
}
