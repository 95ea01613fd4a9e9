//! Fields of an object by who manages them, as server-side apply records it
//! (<https://kubernetes.io/docs/reference/using-api/server-side-apply/>).

use kube::api::DynamicObject;
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The part of `object` that `manager` applies to `subresource` in the version `api_version`; none if it applies nothing.
///
/// # Errors
/// Conflict, if it has applied another version, whose fields may have other names: it will apply this one.
pub(super) fn owned_by(
    object: &DynamicObject,
    (manager, subresource): (&str, &str),
    api_version: &str,
) -> Result<Option<Value>> {
    let entries = object.metadata.managed_fields.iter().flatten();
    let mut applied = entries.filter(|entry| {
        entry.manager.as_deref() == Some(manager)
            && entry.operation.as_deref() == Some("Apply")
            && entry.subresource.as_deref() == Some(subresource)
    });
    let Some(entry) = applied.next() else { return Ok(None) };
    if entry.api_version.as_deref() != Some(api_version) {
        return Err(Error::conflict("object is managed in another version").at(manager).expected(api_version));
    }
    Ok(entry.fields_v1.as_ref().and_then(|fields| part(&object.data, &fields.0)))
}

/// The part of `value` that a set of fields names. A set without members is all of it.
fn part(value: &Value, fields: &Value) -> Option<Value> {
    let members: Vec<(&String, &Value)> = fields.as_object()?.iter().filter(|(key, _)| *key != ".").collect();
    if members.is_empty() {
        return Some(value.clone());
    }
    match value {
        Value::Object(object) => {
            let mut owned = Map::new();
            for (key, fields) in members {
                let Some(name) = key.strip_prefix("f:") else { continue };
                if let Some(value) = object.get(name).and_then(|value| part(value, fields)) {
                    owned.insert(name.to_owned(), value);
                }
            }
            Some(owned.into())
        }
        Value::Array(items) => {
            let owned = members.into_iter().filter_map(|(key, fields)| item(items, key, fields));
            Some(owned.collect::<Vec<_>>().into())
        }
        other => Some(other.clone()),
    }
}

/// The item of a list that a key names: `k:` and its key fields, or `v:` and its value.
fn item(items: &[Value], key: &str, fields: &Value) -> Option<Value> {
    if let Some(value) = key.strip_prefix("v:") {
        let value: Value = serde_json::from_str(value).ok()?;
        return items.contains(&value).then_some(value);
    }
    let keys: Map<String, Value> = serde_json::from_str(key.strip_prefix("k:")?).ok()?;
    let found = items.iter().find(|item| keys.iter().all(|(key, value)| item.get(key) == Some(value)))?;
    let mut owned = part(found, fields)?;
    for (key, value) in keys {
        owned[key] = value;
    }
    Some(owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_manager_has_its_fields_alone() {
        let object = json!({
            "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
            "metadata": {
                "name": "w",
                "managedFields": [
                    { "manager": "kueue-admission", "operation": "Update", "subresource": "status",
                      "fieldsV1": { "f:status": { "f:other": {} } } },
                    { "manager": "old", "operation": "Apply", "subresource": "status",
                      "apiVersion": "kueue.x-k8s.io/v1beta1", "fieldsV1": { "f:status": {} } },
                    { "manager": "kueue-admission", "operation": "Apply", "subresource": "status",
                      "apiVersion": "kueue.x-k8s.io/v1beta2", "fieldsV1": { "f:status": {
                        "f:admission": { "f:clusterQueue": {}, "f:podSetAssignments": {
                            "k:{\"name\":\"main\"}": { ".": {}, "f:count": {}, "f:name": {} } } },
                        "f:conditions": {
                            "k:{\"type\":\"QuotaReserved\"}": { ".": {}, "f:status": {}, "f:type": {} } },
                        "f:finalizers": { "v:\"a\"": {}, "v:\"gone\"": {} },
                        "f:missing": {},
                    } } },
                ],
            },
            "status": {
                "admission": { "clusterQueue": "q", "podSetAssignments": [
                    { "name": "main", "count": 2, "flavors": { "gpu": "burst" } }, { "name": "other", "count": 1 }] },
                "conditions": [{ "type": "PodsReady", "status": "True" },
                    { "type": "QuotaReserved", "status": "True", "reason": "R" }],
                "finalizers": ["a", "b"],
                "other": 7,
            },
        });
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        let expected = json!({ "status": {
            "admission": { "clusterQueue": "q", "podSetAssignments": [{ "name": "main", "count": 2 }] },
            "conditions": [{ "type": "QuotaReserved", "status": "True" }],
            "finalizers": ["a"],
        } });
        let owned = |manager, subresource| owned_by(&object, (manager, subresource), "kueue.x-k8s.io/v1beta2");
        assert_eq!(owned("kueue-admission", "status").unwrap(), Some(expected));
        assert_eq!(owned("towline", "status").unwrap(), None);
        assert_eq!(owned("kueue-admission", "").unwrap(), None);
        assert!(owned("old", "status").is_err());
    }
}
