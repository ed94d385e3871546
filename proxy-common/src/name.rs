//! `names`: the names of Service ports, so that the maps can be read without the agent or the API server.

/// Maximum length of `namespace/name:port` in bytes: two DNS labels of 63, a port name of 63, and two separators are 191.
pub const NAME_BYTES: usize = 192;

/// Value of `names` (the key is the id of the Service port).
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortName {
    /// Number of bytes of [`PortName::text`] that are used.
    pub length: u16,
    /// IP protocol number.
    pub proto: u8,
    /// 4 or 6.
    pub family: u8,
    /// `namespace/name:port` in UTF-8, the rest zero.
    pub text: [u8; NAME_BYTES],
}

impl PortName {
    /// Returns the value of `names`, or `None` if `text` is longer than a legal name can be.
    pub fn new(text: &str, proto: u8, family: u8) -> Option<Self> {
        let mut name = Self { length: text.len() as u16, proto, family, text: [0; NAME_BYTES] };
        name.text.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        Some(name)
    }

    /// Returns the name; an empty string if the entry does not hold one.
    pub fn as_str(&self) -> &str {
        let bytes = self.text.get(..usize::from(self.length)).unwrap_or_default();
        core::str::from_utf8(bytes).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_name_round_trips() {
        let name = PortName::new("default/redis:resp", 6, 4).unwrap();
        assert_eq!(name.as_str(), "default/redis:resp");
    }

    #[test]
    fn a_name_too_long_is_refused() {
        let long = core::str::from_utf8(&[b'a'; NAME_BYTES + 1]).unwrap();
        assert!(PortName::new(long, 6, 4).is_none());
        assert!(PortName::new(&long[..NAME_BYTES], 6, 4).is_some());
    }
}
