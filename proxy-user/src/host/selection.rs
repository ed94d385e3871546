//! Selects the devices to which the packet programs are attached.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::devices::Device;
use super::seen::Present;
use proxy_core::model::DeviceKind;

/// The text is not a pattern of device names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an interface name of at most 15 characters, with * and ? as wildcards")]
pub struct BadPattern;

/// A device name in which `*` stands for any text and `?` for one character.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pattern(String);

impl Pattern {
    /// Whether this pattern matches the name.
    pub fn matches(&self, name: &str) -> bool {
        matches(&self.0, name)
    }
}

impl FromStr for Pattern {
    type Err = BadPattern;

    fn from_str(text: &str) -> Result<Self, BadPattern> {
        // IFNAMSIZ is 16 with the final zero; the kernel refuses slashes, colons and white space.
        let legal = !text.is_empty()
            && text.len() <= 15
            && text.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '/' | ':' | '!' | ','));
        if legal { Ok(Self(text.to_owned())) } else { Err(BadPattern) }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// A part of `--devices`: devices to select, or, with `!` in front, to exclude.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePattern {
    /// The devices.
    pub pattern: Pattern,
    /// Whether the devices are excluded.
    pub is_excluded: bool,
}

impl FromStr for DevicePattern {
    type Err = BadPattern;

    fn from_str(text: &str) -> Result<Self, BadPattern> {
        let excluded = text.strip_prefix('!');
        Ok(Self { pattern: excluded.unwrap_or(text).parse()?, is_excluded: excluded.is_some() })
    }
}

impl fmt::Display for DevicePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.is_excluded { "!" } else { "" }, self.pattern)
    }
}

impl Serialize for DevicePattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The value of `--devices`: empty for the automatic selection, or patterns.
///
/// Patterns without `!` replace the automatic selection; if there are only patterns with `!`, they are exceptions from it. The loopback
/// device is selected unless it is excluded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Selection(pub Vec<DevicePattern>);

impl FromStr for Selection {
    type Err = BadPattern;

    /// Parses patterns that are separated by commas.
    fn from_str(text: &str) -> Result<Self, BadPattern> {
        let patterns = text.split(',').map(str::trim).filter(|_| !text.trim().is_empty());
        patterns.map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let patterns: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.pad(&patterns.join(","))
    }
}

impl Selection {
    /// Whether it only excludes devices, and others than the loopback device.
    pub fn only_excludes(&self) -> bool {
        self.0.iter().all(|one| one.is_excluded) && self.0.iter().any(|one| one.pattern.0 != "lo")
    }

    /// Whether the programs are attached to this device.
    pub fn takes(&self, device: &Device) -> bool {
        let mut named = self.0.iter().filter(|one| one.pattern.matches(&device.name)).peekable();
        // The stack tells this node there which packets with SNAT it could not route.
        if device.kind == DeviceKind::Loopback {
            return named.all(|one| !one.is_excluded);
        }
        if self.0.iter().all(|one| one.is_excluded) {
            return named.peek().is_none() && automatic(device);
        }
        named.peek().is_some() && named.all(|one| !one.is_excluded)
    }

    /// Returns the devices that lead to a pod or container, and get no programs because the operator selects others: packets that
    /// a pod sends there are not translated. The port of a bridge that is selected does not count, nor that of another switch (OVS).
    pub fn left_out<'a>(&'a self, devices: &'a Present<Device>) -> impl Iterator<Item = &'a Device> {
        let has_master = |device: &Device| {
            let is_selected = |other: &Device| other.kind != DeviceKind::Bridge || self.takes(other);
            devices.iter().any(|other| Some(other.ifindex) == device.master && is_selected(other))
        };
        let is_left = move |device: &&Device| {
            device.kind == DeviceKind::Veth
                && device.below_elsewhere
                && automatic(device)
                && !self.takes(device)
        };
        devices.iter().filter(is_left).filter(move |device| !has_master(device))
    }
}

/// Whether packets from or to other machines and pods may pass this device: Ethernet, or no link-layer header.
///
/// Devices whose packets also pass another one are excluded ([`Device::passes_another`]). A bridge is excluded and its ports are included: replies between two pods of one bridge never pass
/// the bridge itself.
fn automatic(device: &Device) -> bool {
    (device.ethernet || device.no_header) && !device.passes_another && device.kind != DeviceKind::Bridge
}

/// Whether `name` matches `pattern`; `*` is any text, `?` one character.
fn matches(pattern: &str, name: &str) -> bool {
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
    use crate::host::seen::Seen;

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
    #[case("", "lo", true)]
    #[case("eth*", "lo", true)]
    #[case("!l*", "lo", false)]
    fn choices(#[case] setting: &str, #[case] name: &str, #[case] expected: bool) {
        let kind = match name {
            "cni0" => DeviceKind::Bridge,
            "lo" => DeviceKind::Loopback,
            _ => DeviceKind::Other,
        };
        let selection: Selection = setting.parse().unwrap();
        assert_eq!(selection.takes(&device(name, kind)), expected);
    }

    #[test]
    fn the_automatic_choice_takes_pods_and_leaves_devices_whose_packets_pass_another() {
        let selection = Selection::default();
        assert!(selection.takes(&device("veth1", DeviceKind::Other)));
        assert!(!selection.takes(&Device { passes_another: true, ..device("eth1", DeviceKind::Other) }));
        assert!(!selection.takes(&Device { ethernet: false, ..device("can0", DeviceKind::Other) }));
        let tunnel = Device { ethernet: false, no_header: true, ..device("wg0", DeviceKind::Other) };
        assert!(selection.takes(&tunnel));
    }

    #[rstest]
    #[case("", "veth1", DeviceKind::Veth, false)]
    #[case("eth*", "veth1", DeviceKind::Veth, true)]
    #[case("eth*,veth*", "veth1", DeviceKind::Veth, false)]
    #[case("eth*,veth*", "cali1", DeviceKind::Veth, true)]
    #[case("!veth*", "veth1", DeviceKind::Veth, true)]
    #[case("eth*", "eth1", DeviceKind::Physical, false)]
    #[case("eth*", "wlan0", DeviceKind::Physical, false)]
    #[case("eth*", "tap0", DeviceKind::Tun, false)]
    fn devices_of_pods_that_are_not_selected_are_left_out(
        #[case] selection: Selection,
        #[case] name: &str,
        #[case] kind: DeviceKind,
        #[case] is_left_out: bool,
    ) {
        let list = vec![
            Device { below_elsewhere: true, ..device(name, kind) },
            Device { ifindex: 3, ..device("eth0", DeviceKind::Physical) },
        ];
        let devices = Seen::start(|| Ok(list.clone())).unwrap().present();
        assert_eq!(selection.left_out(&devices).count(), usize::from(is_left_out));
    }

    #[test]
    fn veth_that_leads_to_no_pod_or_to_a_selected_bridge_is_not_left_out() {
        let left_out = |text: &str, below_elsewhere, kind| {
            let port = Device { master: Some(3), below_elsewhere, ..device("veth1", DeviceKind::Veth) };
            let list = vec![port, Device { ifindex: 3, ..device("cni0", kind) }];
            let devices = Seen::start(|| Ok(list.clone())).unwrap().present();
            text.parse::<Selection>().unwrap().left_out(&devices).count()
        };
        assert_eq!(left_out("eth*,cni0", true, DeviceKind::Bridge), 0);
        assert_eq!(left_out("eth*", true, DeviceKind::Bridge), 1);
        assert_eq!(left_out("eth*", true, DeviceKind::Other), 0, "a port of OVS");
        assert_eq!(left_out("eth*", false, DeviceKind::Bridge), 0, "between two bridges of the node");
    }

    #[test]
    fn empty_or_illegal_pattern_is_refused() {
        for text in ["eth0,", "!", "a,,b", "a/b", "sixteen-letters-"] {
            assert_eq!(text.parse::<Selection>(), Err(BadPattern), "{text}");
        }
    }
}
