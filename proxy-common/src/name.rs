//! `names`: what a Service port is called, so that maps can be read without the agent or the API server.

/// Longest `namespace/name:port`: two DNS labels of 63, a port name of 63, two separators, and a length.
pub const NAME_BYTES: usize = 192;

/// Value of `names` (the key is the id of the Service port).
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortName {
    /// Bytes in use of [`PortName::text`].
    pub length: u16,
    /// IP protocol number.
    pub proto: u8,
    /// 4 or 6.
    pub family: u8,
    /// `namespace/name:port` in UTF-8, the rest zero.
    pub text: [u8; NAME_BYTES],
}

impl PortName {
    /// `None` when `text` is longer than a legal name can be.
    pub fn new(text: &str, proto: u8, family: u8) -> Option<Self> {
        let mut name = Self { length: text.len() as u16, proto, family, text: [0; NAME_BYTES] };
        name.text.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        Some(name)
    }

    /// The name; empty when the entry does not hold one.
    pub fn as_str(&self) -> &str {
        let bytes = self.text.get(..usize::from(self.length)).unwrap_or_default();
        core::str::from_utf8(bytes).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reads_back() {
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
