//! Errors of values.

/// Why a value is not valid, and what would be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Not a duration.
    #[error("expected a duration like 500ms, 30s, 2m or 1m30s")]
    Duration,
    /// Not a duration above zero.
    #[error("expected a duration longer than 0, like 500ms, 30s, 2m or 1m30s")]
    Period,
    /// Not a listen address.
    #[error(
        "expected ADDRESS:PORT or ADDRESS, like 127.0.0.1:10249 or [::]:10256, or an empty value to switch it off"
    )]
    Listen,
    /// Not a log level.
    #[error("expected error, warn, info, debug or trace, or a klog number from 0 to 10")]
    LogLevel,
    /// Not a pattern for device names.
    #[error(
        "expected an interface name of at most 15 characters, with * and ? as wildcards; a leading ! excludes the \
         device, like eth*,!eth9"
    )]
    Devices,
    /// Not an algorithm.
    #[error("expected one of {0}")]
    Algorithm(String),
    /// Not a capacity.
    #[error("expected a number from 1 to {0}")]
    Capacity(u32),
    /// Not a number of bytes.
    #[error("expected a number of bytes, with Ki, Mi, Gi, k, M or G behind it or without, like 200Mi")]
    Bytes,
    /// Not a pattern for uplinks.
    #[error("expected an interface name of at most 15 characters, with * and ? as wildcards, like eth*")]
    Uplinks,
    /// Not a pattern for local devices.
    #[error("expected an interface name of at most 15 characters, with * and ? as wildcards, like tap*")]
    LocalDevices,
    /// Not the URL of an API server.
    #[error("expected the URL of an API server, like https://HOST:6443 or HOST:6443")]
    ApiServer,
    /// Not a range of addresses.
    #[error("expected an address range with a prefix length, like 192.0.2.0/24 or 2001:db8::/32")]
    Range,
    /// Not an address for node ports.
    #[error("expected a range like 192.0.2.0/24, or primary, all or localhost")]
    NodePortAddress,
    /// Not a range of ports.
    #[error(
        "expected one or two ranges FIRST-LAST in ascending order, with ports from 1024 to 65535, like 61000-65535 or \
         1024-29999,61000-65535"
    )]
    PortRange,
    /// Not a range of node ports.
    #[error("expected FIRST-LAST with ports from 1 to 65535, like 30000-32767")]
    NodePortRange,
    /// Not a timeout of a flow.
    #[error("expected whole seconds from 1s to 596h31m23s, like 90s, 30m or 24h")]
    FlowTimeout,
    /// Not a length of the page's history.
    #[error("expected 4m to 24h, like 1h, or 0 for no history")]
    PageHistory,
    /// Not a proxy mode.
    #[error("expected ebpf (iptables, ipvs and nftables are accepted and mean ebpf)")]
    ProxyMode,
}
