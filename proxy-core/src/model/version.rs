//! The versions of objects.

use std::fmt;
use std::num::NonZero;

/// The API server's version of an object; empty if the object comes from a folder.
///
/// Two objects with the same content are equal, whatever their versions are: every value of this type equals every other
/// one, and [`Version::is`] compares. A version with the same content needs no new plan, but then counts as the programmed
/// one.
#[derive(Clone, Debug, Default)]
pub struct Version {
    /// `metadata.uid`.
    pub uid: Opaque,
    /// `metadata.resourceVersion`.
    pub resource_version: Opaque,
    /// `metadata.generation`, for kinds that have one.
    pub generation: Option<NonZero<i64>>,
}

impl Version {
    /// Whether both are the same version.
    pub fn is(&self, other: &Self) -> bool {
        let Self { uid, resource_version, generation } = self;
        (uid, resource_version, generation) == (&other.uid, &other.resource_version, &other.generation)
    }
}

impl PartialEq for Version {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Version {}

/// A text of the API server that is only compared and printed again. Numbers and UUIDs, which API servers use, take no
/// memory besides the value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opaque(Form);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Form {
    #[default]
    Empty,
    Number(u64),
    /// As bytes, which need no alignment, so that the type is no larger than with a text alone.
    Uuid([u8; 16]),
    Text(Box<str>),
}

impl Opaque {
    /// Whether there is no text.
    pub const fn is_empty(&self) -> bool {
        matches!(self.0, Form::Empty)
    }
}

impl From<&str> for Opaque {
    fn from(text: &str) -> Self {
        if text.is_empty() {
            return Self::default();
        }
        let number = || text.parse().ok().map(Form::Number);
        let uuid = || {
            let digits: String = text.split('-').collect();
            let value = u128::from_str_radix(&digits, 16).ok()?;
            Some(Form::Uuid(value.to_be_bytes()))
        };
        // A form is used only if it prints the same text again.
        let forms = [number(), uuid()].into_iter().flatten().map(Self);
        forms
            .into_iter()
            .find(|form| form.to_string() == text)
            .unwrap_or_else(|| Self(Form::Text(text.into())))
    }
}

impl fmt::Display for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Form::Empty => Ok(()),
            Form::Number(number) => write!(f, "{number}"),
            Form::Text(text) => f.write_str(text),
            Form::Uuid(bytes) => bytes.iter().enumerate().try_for_each(|(at, byte)| {
                let dash = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
                write!(f, "{dash}{byte:02x}")
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resource_versions_round_trip() {
        let uuid = "01234567-89ab-cdef-0123-456789abcdef";
        for text in [
            "",
            "0",
            "7",
            "18446744073709551615",
            "18446744073709551616",
            "007",
            "+7",
            "-7",
            "7 ",
            uuid,
            "u-1",
            "a",
            "01234567-89AB-cdef-0123-456789abcdef",
            "0123456789abcdef0123456789abcdef",
            "--",
            "é",
            "0-1234567-89ab-cdef-0123-456789abcdef",
            "0000000-0000-0000-0000-000000000000",
        ] {
            assert_eq!(Opaque::from(text).to_string(), text);
            assert_eq!(Opaque::from(text).is_empty(), text.is_empty());
        }
        assert!(
            matches!(Opaque::from(uuid).0, Form::Uuid(_)) && matches!(Opaque::from("70").0, Form::Number(70))
        );
        assert_ne!(Opaque::from("7"), Opaque::from("07"));
        assert_eq!(size_of::<Opaque>(), 24);
    }
}
