//! Values and attributes in OTLP's JSON encoding, which writes 64-bit integers as strings.

use std::borrow::Cow;

use serde::{Serialize, Serializer};

/// Longest text of a value, in bytes; it limits the memory that a waiting record takes.
const LONGEST: usize = 2048;

/// OTLP's `AnyValue`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Value {
    /// A text.
    #[serde(rename = "stringValue")]
    Text(String),
    /// An integer.
    #[serde(rename = "intValue", serialize_with = "decimal")]
    Int(i64),
    /// True or false.
    #[serde(rename = "boolValue")]
    Bool(bool),
    /// A floating-point number.
    #[serde(rename = "doubleValue")]
    Double(f64),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.get(..text.floor_char_boundary(LONGEST)).unwrap_or(text).to_owned())
    }
}

impl From<String> for Value {
    fn from(mut text: String) -> Self {
        text.truncate(text.floor_char_boundary(LONGEST));
        Self::Text(text)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Int(number.into())
    }
}

impl From<u16> for Value {
    fn from(number: u16) -> Self {
        Self::Int(number.into())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        i64::try_from(number).map_or_else(|_| Self::Text(number.to_string()), Self::Int)
    }
}

/// OTLP's `KeyValue`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attribute {
    /// Name of the attribute.
    pub key: Cow<'static, str>,
    /// Value of the attribute.
    pub value: Value,
}

/// Attributes with unique names, in the order in which they were added.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Attributes(Vec<Attribute>);

impl Attributes {
    /// Sets an attribute, and replaces a previous value.
    pub fn set(&mut self, key: impl Into<Cow<'static, str>>, value: impl Into<Value>) {
        let (key, value) = (key.into(), value.into());
        match self.0.iter_mut().find(|attribute| attribute.key == key) {
            Some(attribute) => attribute.value = value,
            None => self.0.push(Attribute { key, value }),
        }
    }

    /// Sets an attribute if there is a value.
    pub fn set_some(&mut self, key: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.set(key, value);
        }
    }

    /// Returns the value of an attribute.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|attribute| attribute.key == key).map(|attribute| &attribute.value)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn decimal<S: Serializer>(number: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

/// Writes nanoseconds since 1970 as a decimal string.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
pub(super) fn nanoseconds<S: Serializer>(time: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(time)
}
