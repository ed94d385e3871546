//! Annotations that select what happens to connections to removed endpoints.

use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::spread::field;
use super::{Problems, annotation};
use proxy_core::model::RemovalPolicy;

/// Whether connections drain or are reset.
pub const ANNOTATION_POLICY: &str = "ballast.io/removal-policy";
/// How long after the removal of an endpoint its connections are reset.
pub const ANNOTATION_DELAY: &str = "ballast.io/removal-delay";

/// Returns the removal policy of a Service. A bad policy counts as the default, and a bad delay as no delay.
pub fn policy(metadata: &ObjectMeta, problems: &mut Problems) -> RemovalPolicy {
    // The delay is always read, so that a bad one is reported before it has an effect.
    let delay = delay(metadata, problems);
    match annotation(metadata, ANNOTATION_POLICY).map(str::trim) {
        None | Some("drain") => RemovalPolicy::Drain,
        Some("reset") => RemovalPolicy::Reset(delay),
        Some(text) => {
            let names = RemovalPolicy::NAMES.join(", ");
            problems.add(
                field(ANNOTATION_POLICY),
                &format_args!(
                    "`{text}` is not a removal policy: give one of {names}; until then the default applies (drain)"
                ),
            );
            RemovalPolicy::Drain
        }
    }
}

fn delay(metadata: &ObjectMeta, problems: &mut Problems) -> Duration {
    let Some(text) = annotation(metadata, ANNOTATION_DELAY).map(str::trim) else { return Duration::ZERO };
    let found = text.parse::<SignedDuration>().ok().and_then(|delay| Duration::try_from(delay).ok());
    found.filter(|delay| *delay <= RemovalPolicy::LONGEST).unwrap_or_else(|| {
        problems.add(
            field(ANNOTATION_DELAY),
            &format_args!("`{text}` is not a delay: give a duration from 0s to 24h, like 30s, 5m or 1h; until then 0s applies"),
        );
        Duration::ZERO
    })
}
