//! The kinds of values, by kube-proxy's rules of validation.

use std::collections::BTreeMap;
use std::time::Duration;

use ipnet::IpNet;
use serde_json::json;

use super::tree::Node;
use proxy_cli::value::{self, DetectLocalMode, Listen};

/// The kind of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingKind {
    /// `true` or `false`.
    Bool,
    /// A whole number in this range, including its ends.
    Int(i64, i64),
    /// Any number.
    Number,
    /// A duration in Go's format, not negative.
    Duration,
    /// Any text.
    Text,
    /// An IP address, or nothing.
    Ip,
    /// An IP address, with or without port, or nothing.
    Listen,
    /// `iptables`, `ipvs`, `nftables`, `ebpf`, or nothing.
    Mode,
    /// One of kube-proxy's four modes to recognize pods, or nothing.
    LocalMode,
    /// `text` or `json`.
    LogFormat,
    /// One range, or one of each address family, in one text.
    ClusterCidr,
    /// A list of ranges.
    Cidrs,
    /// A list of ranges, and of `primary`, `localhost` and `all`, each at most once.
    NodePortAddresses,
    /// Names of features, switched on or off.
    Gates,
    /// Any value; it is not used.
    Any,
}

/// A value that is valid for its kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Of [`SettingKind::Bool`].
    Bool(bool),
    /// Of [`SettingKind::Int`].
    Int(i64),
    /// Of [`SettingKind::Number`].
    Number(f64),
    /// Of [`SettingKind::Duration`].
    Duration(Duration),
    /// Of all kinds that are one text.
    Text(String),
    /// Of all kinds that are lists.
    List(Vec<String>),
    /// Of [`SettingKind::Gates`].
    Gates(BTreeMap<String, bool>),
    /// Of [`SettingKind::Any`], as it was written.
    Any(serde_json::Value),
    /// Breaks a rule that counts only in the modes that use the setting; the text says which one.
    Unfit(String),
}

/// Why a value is not valid; the text states what would be valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// It is of another type: kube-proxy cannot decode it.
    #[error("{0}")]
    Type(String),
    /// It is of the right type, but breaks a rule of kube-proxy's validation.
    #[error("{0}")]
    Rule(String),
}

impl Value {
    /// Whether it is not one of the empty values of generated files: empty, zero, `false`.
    pub fn asks_for_something(&self) -> bool {
        match self {
            Self::Bool(on) => *on,
            Self::Int(number) => *number != 0,
            Self::Number(number) => *number != 0.0,
            Self::Duration(duration) => !duration.is_zero(),
            Self::Text(text) => !text.is_empty(),
            Self::List(list) => !list.is_empty(),
            Self::Gates(gates) => !gates.is_empty(),
            Self::Unfit(_) => true,
            Self::Any(value) => {
                ![json!(null), json!(0), json!(""), json!("0"), json!("0s"), json!([])].contains(value)
            }
        }
    }
}

impl SettingKind {
    /// Returns what would be valid.
    pub fn expected(self) -> String {
        match self {
            Self::Bool => "give true or false".to_owned(),
            Self::Int(least, most) => format!("give a whole number from {least} to {most}"),
            Self::Number => "give a number".to_owned(),
            Self::Duration => "give a duration that is not negative, like 30s or 1m30s".to_owned(),
            Self::Text => "give a string, and put a number in quotes".to_owned(),
            Self::Ip => "give an IP address, like 0.0.0.0 or ::".to_owned(),
            Self::Listen => {
                "give an IP address with a port from 1 to 65535, like 127.0.0.1:10249 or [::]:10256"
                    .to_owned()
            }
            Self::Mode => "give iptables, ipvs, nftables or ebpf (all mean ebpf), or nothing".to_owned(),
            Self::LocalMode => {
                "give ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix, or nothing".to_owned()
            }
            Self::LogFormat => "give text or json".to_owned(),
            Self::ClusterCidr => {
                "give one range, or one of each address family, like 10.100.0.0/16,fde4:8dba:82e1::/48"
                    .to_owned()
            }
            Self::Cidrs => "give ranges like 192.0.2.0/24".to_owned(),
            Self::NodePortAddresses => {
                "give ranges like 192.0.2.0/24, and primary, localhost or all, each at most once".to_owned()
            }
            Self::Gates => "give names of features with true or false".to_owned(),
            Self::Any => String::new(),
        }
    }

    /// Whether the setting may be given without a value on a command line, which means `true`.
    pub const fn is_switch(self) -> bool {
        matches!(self, Self::Bool)
    }

    /// Returns the value of a node of a document; `None` for `null`. An error states what would be valid.
    pub fn of_node(self, node: &Node) -> Result<Option<Value>, Wrong> {
        let wrong = || Wrong::Type(self.expected());
        let value = match (self, node) {
            (_, Node::Null) => return Ok(None),
            (Self::Any, node) => Value::Any(plain(node)),
            (Self::Bool, Node::Bool(value)) => Value::Bool(*value),
            (Self::Int(..), Node::Int(value)) => Value::Int(*value),
            (Self::Number, Node::Int(value)) => {
                Value::Number(i32::try_from(*value).map_err(|_| wrong())?.into())
            }
            (Self::Number, Node::Float(value)) => Value::Number(*value),
            (Self::Duration, Node::Text(text)) => return self.of_text(text).map(Some),
            (Self::Cidrs | Self::NodePortAddresses, Node::List(items)) => {
                let text = |node: &Node| match node {
                    Node::Text(text) => Some(text.clone()),
                    _ => None,
                };
                let texts: Option<_> = items.iter().map(|item| text(&item.value)).collect();
                Value::List(texts.ok_or_else(wrong)?)
            }
            (Self::Gates, Node::Map(entries)) => {
                let gate = |(name, on): &(serde_saphyr::Spanned<String>, serde_saphyr::Spanned<Node>)| {
                    match on.value {
                        Node::Bool(on) => Some((name.value.clone(), on)),
                        _ => None,
                    }
                };
                let gates: Option<_> = entries.iter().map(gate).collect();
                Value::Gates(gates.ok_or_else(wrong)?)
            }
            (
                Self::Text
                | Self::Ip
                | Self::Listen
                | Self::Mode
                | Self::LocalMode
                | Self::LogFormat
                | Self::ClusterCidr,
                Node::Text(text),
            ) => Value::Text(text.clone()),
            _ => return Err(wrong()),
        };
        self.check(value).map(Some)
    }

    /// Returns the value of a flag, or of a duration in a document.
    pub fn of_text(self, text: &str) -> Result<Value, Wrong> {
        let is_negative =
            |text: &str| text.strip_prefix('-').is_some_and(|text| value::go_duration(text).is_ok());
        if self == Self::Duration && is_negative(text) {
            return Err(Wrong::Rule(self.expected()));
        }
        let list = || text.split(',').map(str::trim).filter(|part| !part.is_empty());
        let value = match self {
            // The spellings of Go's `strconv.ParseBool`.
            Self::Bool => match text {
                "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(Value::Bool(true)),
                "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(Value::Bool(false)),
                _ => None,
            },
            Self::Int(..) => text.parse().ok().map(Value::Int),
            Self::Number => text.parse().ok().map(Value::Number),
            Self::Duration => value::go_duration(text).ok().map(Value::Duration),
            Self::Cidrs | Self::NodePortAddresses => Some(Value::List(list().map(str::to_owned).collect())),
            Self::Gates => list()
                .map(|part| {
                    part.split_once('=').and_then(|(name, on)| Some((name.to_owned(), on.parse().ok()?)))
                })
                .collect::<Option<_>>()
                .map(Value::Gates),
            Self::Any => Some(Value::Any(json!(text))),
            _ => Some(Value::Text(text.to_owned())),
        };
        self.check(value.ok_or_else(|| Wrong::Type(self.expected()))?)
    }

    fn check(self, value: Value) -> Result<Value, Wrong> {
        if let (Self::Int(..), Value::Int(number)) = (self, &value)
            && i32::try_from(*number).is_err()
        {
            return Err(Wrong::Type(self.expected()));
        }
        let is_range = |text: &str| value::range(text).is_ok();
        let is_right = match (self, &value) {
            (Self::Int(least, most), Value::Int(number)) => (least..=most).contains(number),
            (_, Value::Text(text)) if text.is_empty() => true,
            (Self::Ip, Value::Text(text)) => value::address(text).is_ok(),
            (Self::Listen, Value::Text(text)) => {
                text.parse().is_ok_and(|listen: Listen| listen.resolve(1).is_some_and(|at| at.port() != 0))
            }
            (Self::Mode, Value::Text(text)) => matches!(&**text, "iptables" | "ipvs" | "nftables" | "ebpf"),
            (Self::LocalMode, Value::Text(text)) => DetectLocalMode::from_name(text).is_some(),
            (Self::LogFormat, Value::Text(text)) => matches!(&**text, "text" | "json"),
            (Self::ClusterCidr, Value::Text(text)) => {
                let ranges: Result<Vec<_>, _> = text.split(',').map(value::range).collect();
                let is_pair = |one: &IpNet, other: &IpNet| one.addr().is_ipv4() != other.addr().is_ipv4();
                ranges.is_ok_and(|ranges| match &ranges[..] {
                    [one, other] => is_pair(one, other),
                    ranges => ranges.len() == 1,
                })
            }
            (Self::Cidrs, Value::List(list)) => list.iter().all(|text| is_range(text)),
            (Self::NodePortAddresses, Value::List(list)) => {
                let is_word = |text: &str| matches!(text, "primary" | "localhost" | "all");
                let is_new = |(at, text): (usize, &String)| !is_word(text) || !list[..at].contains(text);
                list.iter().enumerate().all(is_new) && list.iter().all(|text| is_word(text) || is_range(text))
            }
            _ => true,
        };
        if is_right { Ok(value) } else { Err(Wrong::Rule(self.expected())) }
    }
}

/// Returns a document's value without its places.
fn plain(node: &Node) -> serde_json::Value {
    match node {
        Node::Null => serde_json::Value::Null,
        Node::Bool(value) => json!(value),
        Node::Int(value) => json!(value),
        Node::Float(value) => json!(value),
        Node::Text(value) => json!(value),
        Node::List(items) => items.iter().map(|item| plain(&item.value)).collect(),
        Node::Map(entries) => {
            entries.iter().map(|(key, value)| (key.value.clone(), plain(&value.value))).collect()
        }
    }
}
