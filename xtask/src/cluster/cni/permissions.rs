//! Permissions of a CNI plugin's daemon.

use serde_json::{Value, json};

/// Verbs of a daemon that follows objects.
pub const WATCH: &[&str] = &["get", "list", "watch"];

/// Resources of an API group, and what a user may do with them.
pub type Rule<'a> = (&'a str, &'a [&'a str], &'a [&'a str]);

/// Returns a role of the user's name, and its binding to the user.
pub fn role(user: &str, rules: &[Rule<'_>]) -> Value {
    let (group, api) = ("rbac.authorization.k8s.io", "rbac.authorization.k8s.io/v1");
    let rule = |&(group, resources, verbs): &Rule<'_>| json!({ "apiGroups": [group], "resources": resources, "verbs": verbs });
    json!({ "apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": api,
            "kind": "ClusterRole",
            "metadata": { "name": user },
            "rules": rules.iter().map(rule).collect::<Vec<_>>(),
        },
        {
            "apiVersion": api,
            "kind": "ClusterRoleBinding",
            "metadata": { "name": user },
            "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": user },
            "subjects": [{ "apiGroup": group, "kind": "User", "name": user }],
        },
    ] })
}
