//! The given settings by name, with the place of each.

use std::collections::BTreeMap;
use std::time::Duration;

use super::fields::{Effect, Modes, SETTINGS, Setting};
use super::kind::Value;

/// A value and where it was given.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// The value.
    pub value: Value,
    /// `FILE:LINE:COLUMN: FIELD`, or `--flag`.
    pub place: String,
}

/// The settings that were given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Values {
    /// By [`Setting::key`].
    given: BTreeMap<&'static str, Given>,
    /// One line for each part of a file that is ignored, since it is no setting, or is given again below.
    pub ignored: Vec<String>,
}

impl Values {
    /// Stores the value that was given for a setting.
    pub fn insert(&mut self, setting: &Setting, given: Given) {
        self.given.insert(setting.key(), given);
    }

    /// Decides about values that count only in some modes: removes those that these modes do not use, and returns an error for
    /// each of the others.
    pub fn settle(&mut self, modes: Modes<'_>) -> Vec<String> {
        let mut errors = Vec::new();
        for setting in SETTINGS {
            let Some(Given { value: Value::Unfit(why), place }) = self.given.get(setting.key()) else {
                continue;
            };
            match setting.unused(modes) {
                Some(unused) => self.ignored.push(format!("{place} is ignored: {unused}: {why}")),
                None => errors.push(format!("{place}: {why}")),
            }
            self.given.remove(setting.key());
        }
        errors
    }

    /// Returns the value and its place.
    pub fn given(&self, key: &str) -> Option<&Given> {
        self.given.get(key)
    }

    /// Returns where the setting was given.
    pub fn place(&self, key: &str) -> String {
        self.given.get(key).map_or_else(|| key.to_owned(), |given| given.place.clone())
    }

    /// Returns the value of a switch.
    pub fn switch(&self, key: &str) -> Option<bool> {
        match self.given.get(key)?.value {
            Value::Bool(on) => Some(on),
            _ => None,
        }
    }

    /// Returns a whole number.
    pub fn number(&self, key: &str) -> Option<i64> {
        match self.given.get(key)?.value {
            Value::Int(number) => Some(number),
            _ => None,
        }
    }

    /// Returns a duration; `None` for zero, as in kube-proxy.
    pub fn duration(&self, key: &str) -> Option<Duration> {
        match self.given.get(key)?.value {
            Value::Duration(duration) => Some(duration).filter(|duration| !duration.is_zero()),
            _ => None,
        }
    }

    /// Returns a text that is not empty.
    pub fn text(&self, key: &str) -> Option<&str> {
        match &self.given.get(key)?.value {
            Value::Text(text) => Some(&**text).filter(|text| !text.is_empty()),
            _ => None,
        }
    }

    /// Returns a list that is not empty.
    pub fn list(&self, key: &str) -> Option<&[String]> {
        match &self.given.get(key)?.value {
            Value::List(list) => Some(&**list).filter(|list| !list.is_empty()),
            _ => None,
        }
    }

    /// Returns the features that were switched on or off.
    pub fn gates(&self) -> impl Iterator<Item = (&str, bool)> {
        let gates = match self.given.get("featureGates").map(|given| &given.value) {
            Some(Value::Gates(gates)) => Some(gates),
            _ => None,
        };
        gates.into_iter().flatten().map(|(name, on)| (&**name, *on))
    }

    /// Returns one line for each setting that was given and is ignored.
    pub fn idle(&self) -> impl Iterator<Item = String> {
        SETTINGS.iter().filter_map(|setting| {
            let Effect::Idle(why) = setting.effect else { return None };
            let given = self.given.get(setting.key()).filter(|given| given.value.asks_for_something())?;
            Some(format!("{} is ignored: {why}", given.place))
        })
    }

    /// Returns every setting that was given.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Given)> {
        self.given.iter().map(|(key, given)| (*key, given))
    }
}
