//! Values of flags that select devices.

use proxy_cli::value::ValueError;

use crate::host::selection::{DevicePattern, Pattern};

/// Parses one pattern of `--devices`.
pub fn device_pattern(text: &str) -> Result<DevicePattern, ValueError> {
    text.parse().map_err(|_| ValueError::Devices)
}

/// Parses one pattern of `--uplinks`.
pub fn uplink_pattern(text: &str) -> Result<Pattern, ValueError> {
    text.parse().map_err(|_| ValueError::Uplinks)
}

/// Parses one pattern of `--local-devices`.
pub fn local_device_pattern(text: &str) -> Result<Pattern, ValueError> {
    text.parse().map_err(|_| ValueError::LocalDevices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("eth0", true)]
    #[case("!cali*", true)]
    #[case("*", true)]
    #[case("", false)]
    #[case("!", false)]
    #[case("a/b", false)]
    #[case("sixteen-letters-", false)]
    fn device_patterns(#[case] text: &str, #[case] legal: bool) {
        assert_eq!(device_pattern(text).is_ok(), legal);
    }
}
