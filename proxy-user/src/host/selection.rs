//! Which devices the packet programs go to.

use std::str::FromStr;

use super::devices::Device;
use crate::model::DeviceKind;

/// A pattern of `--devices` that says nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--devices: empty pattern; write `eth*`, or `!docker0` to leave a device out")]
pub struct EmptyPattern;

/// The value of `--devices`: nothing for the automatic choice, or patterns.
///
/// A pattern is a device name in which `*` stands for any text and `?` for one character; with `!` in front it
/// leaves devices out. Patterns without `!` replace the automatic choice; if there are only patterns with `!`,
/// they are exceptions from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    wanted: Vec<String>,
    unwanted: Vec<String>,
}

impl FromStr for Selection {
    type Err = EmptyPattern;

    /// Patterns separated by commas.
    fn from_str(text: &str) -> Result<Self, EmptyPattern> {
        let mut selection = Self::default();
        for pattern in text.split(',').map(str::trim).filter(|_| !text.trim().is_empty()) {
            let (list, pattern) = match pattern.strip_prefix('!') {
                Some(rest) => (&mut selection.unwanted, rest),
                None => (&mut selection.wanted, pattern),
            };
            if pattern.is_empty() {
                return Err(EmptyPattern);
            }
            list.push(pattern.to_owned());
        }
        Ok(selection)
    }
}

impl Selection {
    /// Whether the programs go to this device.
    pub fn takes(&self, device: &Device) -> bool {
        let among = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, &device.name));
        if among(&self.unwanted) {
            return false;
        }
        if self.wanted.is_empty() { automatic(device) } else { among(&self.wanted) }
    }
}

/// Devices over which a packet comes from, or goes to, somebody else: Ethernet, and those without link-layer header.
///
/// Ports of a bond or team carry what the bond carries, so each packet would pass twice. A bridge is left out and
/// its ports are taken: replies between two pods of one bridge never pass the bridge itself.
fn automatic(device: &Device) -> bool {
    (device.ethernet || device.no_header) && !matches!(device.kind, DeviceKind::Bridge) && !device.bonded
}

/// Whether `name` is what `pattern` describes; `*` is any text, `?` one character.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    let mut pattern_chars = pattern.chars();
    match pattern_chars.next() {
        None => name.is_empty(),
        Some('*') => {
            let rest = pattern_chars.as_str();
            name.char_indices()
                .map(|(at, _)| at)
                .chain([name.len()])
                .any(|at| name.get(at..).is_some_and(|tail| matches(rest, tail)))
        }
        Some(wanted) => {
            let mut name_chars = name.chars();
            name_chars.next().is_some_and(|found| wanted == '?' || wanted == found)
                && matches(pattern_chars.as_str(), name_chars.as_str())
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn device(name: &str, kind: DeviceKind) -> Device {
        Device { ifindex: 2, name: name.to_owned(), ethernet: true, kind, ..Device::default() }
    }

    #[rstest]
    #[case("eth0", "eth0", true)]
    #[case("eth0", "eth01", false)]
    #[case("eth*", "eth", true)]
    #[case("*", "anything", true)]
    #[case("e*h?", "en-ethX", true)]
    #[case("e*h?", "eth", false)]
    #[case("*0*1", "a0b0c1", true)]
    #[case("?", "", false)]
    fn patterns(#[case] pattern: &str, #[case] name: &str, #[case] expected: bool) {
        assert_eq!(matches(pattern, name), expected);
    }

    #[rstest]
    #[case("", "eth0", true)]
    #[case("", "cni0", false)]
    #[case("cni0", "cni0", true)]
    #[case("cni0", "eth0", false)]
    #[case("!eth0", "eth0", false)]
    #[case("!eth0", "eth1", true)]
    #[case("!eth0", "cni0", false)]
    #[case("eth*, !eth1", "eth1", false)]
    #[case("eth*, !eth1", "eth2", true)]
    fn choices(#[case] setting: &str, #[case] name: &str, #[case] expected: bool) {
        let kind = if name == "cni0" { DeviceKind::Bridge } else { DeviceKind::Other };
        let selection: Selection = setting.parse().unwrap();
        assert_eq!(selection.takes(&device(name, kind)), expected);
    }

    #[test]
    fn the_automatic_choice_takes_pods_and_leaves_ports_of_bonds() {
        let selection = Selection::default();
        assert!(selection.takes(&device("veth1", DeviceKind::Other)));
        assert!(!selection.takes(&Device { bonded: true, ..device("eth1", DeviceKind::Other) }));
        assert!(!selection.takes(&Device { ethernet: false, ..device("lo", DeviceKind::Other) }));
        let tunnel = Device { ethernet: false, no_header: true, ..device("wg0", DeviceKind::Other) };
        assert!(selection.takes(&tunnel));
    }

    #[test]
    fn an_empty_pattern_is_refused() {
        for text in ["eth0,", "!", "a,,b"] {
            assert_eq!(text.parse::<Selection>(), Err(EmptyPattern), "{text}");
        }
    }
}
