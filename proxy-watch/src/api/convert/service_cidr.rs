//! Converts a networking.k8s.io/v1 `ServiceCIDR`.

use crate::api::objects;
use proxy_core::model::ServiceCidr;

use super::address;

/// Returns the ranges of a `ServiceCIDR`. The API server has checked them; ranges that cannot be parsed are left out.
pub fn service_cidr(object: objects::ServiceCidr) -> ServiceCidr {
    let texts = object.spec.and_then(|spec| spec.cidrs).unwrap_or_default();
    ServiceCidr {
        name: object.metadata.name.unwrap_or_default(),
        ranges: texts.iter().filter_map(|text| address::range(text).ok()).collect(),
    }
}
