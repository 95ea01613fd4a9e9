//! Objects of an API server: versions, managers of fields, and what watches see.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::apply::{Path, at, fields_v1, leaves, paths_of, remove, set};
use super::is_selected;
use super::schema::Schemas;

/// Kind, namespace (empty for objects of the cluster) and name.
pub(super) type Key = (String, String, String);

/// A refusal: status, reason and message.
#[derive(Debug)]
pub(super) struct Refused(pub u16, pub &'static str, pub String);

/// A change that watches see.
#[derive(Clone)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) plural: String,
    pub(super) kind: &'static str,
    pub(super) object: Value,
    /// The object before; null if there was none.
    before: Value,
}

impl Change {
    /// Kind of the change, as a watch with a field selector sees it; none if it does not.
    pub(super) fn kind_for(&self, selector: Option<&str>) -> Option<&'static str> {
        let was = !self.before.is_null() && is_selected(&self.before, selector);
        match (was, is_selected(&self.object, selector)) {
            (_, true) if self.kind == "DELETED" => Some("DELETED"),
            (true, true) => Some("MODIFIED"),
            (false, true) => Some("ADDED"),
            (true, false) => Some("DELETED"),
            (false, false) => None,
        }
    }
}

pub(super) struct Store {
    schemas: Schemas,
    pub(super) objects: BTreeMap<Key, Value>,
    pub(super) version: u64,
    pub(super) changes: Vec<Change>,
    /// Version up to which changes are forgotten.
    pub(super) compacted: u64,
}

impl Default for Store {
    fn default() -> Self {
        let (objects, changes) = (BTreeMap::new(), Vec::new());
        // Versions are no numbers that anybody may count with.
        Self { schemas: Schemas::read(), objects, version: 1000, changes, compacted: 0 }
    }
}

impl Store {
    pub(super) fn get(&self, key: &Key) -> Result<&Value, Refused> {
        self.objects.get(key).ok_or_else(|| Refused(404, "NotFound", format!("{} {:?} not found", key.0, key.2)))
    }

    /// Creates an object with a spec.
    pub(super) fn create(&mut self, key: &Key, mut object: Value) -> Result<Value, Refused> {
        if self.objects.contains_key(key) {
            return Err(Refused(409, "AlreadyExists", format!("{} {:?} already exists", key.0, key.2)));
        }
        self.check(key, &object)?;
        let metadata = &mut object["metadata"];
        metadata["uid"] = format!("uid-{}", self.version).into();
        metadata["generation"] = 1.into();
        metadata["creationTimestamp"] = "2026-11-01T00:00:00Z".into();
        Ok(self.put(key, object, "ADDED"))
    }

    /// Replaces an object that is still at the version that `object` has.
    pub(super) fn replace(&mut self, key: &Key, mut object: Value) -> Result<Value, Refused> {
        let before = self.get(key)?.clone();
        self.check(key, &object)?;
        check_version(&before, &object)?;
        for kept in ["uid", "creationTimestamp", "generation", "managedFields"] {
            object["metadata"][kept] = before["metadata"][kept].clone();
        }
        Ok(self.put(key, object, "MODIFIED"))
    }

    pub(super) fn delete(&mut self, key: &Key) {
        let mut object = self.objects.remove(key).unwrap();
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let before = object.clone();
        let change = Change { version: self.version, plural: key.0.clone(), kind: "DELETED", object, before };
        self.changes.push(change);
    }

    /// Applies the status of `applied` for `manager`.
    pub(super) fn apply(
        &mut self,
        key: &Key,
        applied: &Value,
        (manager, force): (&str, bool),
    ) -> Result<Value, Refused> {
        let mut object = self.get(key)?.clone();
        // Required fields are checked after the merge.
        let mut unknown = self.schemas.violations(&key.0, applied);
        unknown.retain(|violation| !violation.ends_with("required value"));
        if !unknown.is_empty() {
            return Err(Refused(400, "BadRequest", format!("strict decoding error: {}", unknown.join(", "))));
        }
        check_version(&object, applied)?;
        let mut managers = managers_of(&object);
        let (own, status) = ((manager.to_owned(), "Apply"), &applied["status"]);
        let fields = leaves(self.schemas.part(&key.0, "status"), status);
        for path in &fields {
            let same = at(&object["status"], path) == at(status, path);
            for (other, theirs) in managers.iter_mut().filter(|(other, _)| **other != own) {
                if !same && theirs.contains(path) && !force {
                    let text = format!("conflict with {:?}: .status {path:?}", other.0);
                    return Err(Refused(409, "Conflict", text));
                }
                if !same {
                    theirs.remove(path);
                }
            }
        }
        let before = managers.insert(own.clone(), fields.clone()).unwrap_or_default();
        let still = |path: &Path| managers.iter().any(|(_, theirs)| theirs.contains(path));
        let dropped: Vec<Path> = before.into_iter().filter(|path| !still(path)).collect();
        for path in dropped {
            remove(&mut object["status"], &path);
        }
        for path in &fields {
            set(&mut object["status"], path, at(status, path).unwrap().clone());
        }
        self.keep(key, object, managers)
    }

    /// Merges the status of `patch` (RFC 7386) for `manager`.
    pub(super) fn merge(&mut self, key: &Key, patch: &Value, manager: &str) -> Result<Value, Refused> {
        let mut object = self.get(key)?.clone();
        check_version(&object, patch)?;
        let before = object["status"].clone();
        merge(&mut object["status"], &patch["status"]);
        self.check(key, &object)?;
        let schema = self.schemas.part(&key.0, "status");
        let after = leaves(schema, &object["status"]);
        let changed: BTreeSet<Path> =
            after.iter().filter(|path| at(&before, path) != at(&object["status"], path)).cloned().collect();
        let mut managers = managers_of(&object);
        managers.values_mut().for_each(|theirs| theirs.retain(|path| after.contains(path) && !changed.contains(path)));
        managers.entry((manager.to_owned(), "Update")).or_default().extend(changed);
        self.keep(key, object, managers)
    }

    /// Patches a pod by a strategic merge, as far as the API server lets anybody change a pod that is not scheduled: gates are removed (<https://kubernetes.io/docs/concepts/scheduling-eviction/pod-scheduling-readiness/>).
    pub(super) fn patch_pod(&mut self, key: &Key, patch: &Value) -> Result<Value, Refused> {
        let mut pod = self.get(key)?.clone();
        check_version(&pod, patch)?;
        let invalid = |text: &str| Refused(422, "Invalid", format!("{text}: {patch}"));
        for (name, _) in patch["metadata"].as_object().into_iter().flatten() {
            match name.as_str() {
                "uid" | "resourceVersion" => {}
                _ => return Err(invalid("metadata that no test changes")),
            }
        }
        for (name, value) in patch["spec"].as_object().into_iter().flatten() {
            if name != "schedulingGates" {
                return Err(invalid("pod updates may not change this field"));
            }
            for gate in value.as_array().ok_or_else(|| invalid("not a list"))? {
                if gate["$patch"] != "delete" {
                    return Err(invalid("only deletion is allowed"));
                }
                let gates = pod["spec"]["schedulingGates"].as_array_mut().ok_or_else(|| invalid("no gates"))?;
                gates.retain(|own| own["name"] != gate["name"]);
            }
        }
        Ok(self.put(key, pod, "MODIFIED"))
    }

    fn keep(
        &mut self,
        key: &Key,
        mut object: Value,
        managers: BTreeMap<(String, &'static str), BTreeSet<Path>>,
    ) -> Result<Value, Refused> {
        self.check(key, &object)?;
        self.check_rules(key, &object)?;
        let entries = managers.into_iter().filter(|(_, paths)| !paths.is_empty());
        let entries = entries.map(|((manager, operation), paths)| {
            json!({
                "manager": manager, "operation": operation, "subresource": "status",
                "apiVersion": "kueue.x-k8s.io/v1beta2", "fieldsType": "FieldsV1", "time": "2026-11-01T00:00:00Z",
                "fieldsV1": { "f:status": fields_v1(&paths) },
            })
        });
        object["metadata"]["managedFields"] = entries.collect::<Vec<_>>().into();
        if object == self.objects[key] {
            return Ok(object);
        }
        Ok(self.put(key, object, "MODIFIED"))
    }

    fn check(&self, key: &Key, object: &Value) -> Result<(), Refused> {
        if !self.schemas.know(&key.0) {
            return Ok(());
        }
        let violations = self.schemas.violations(&key.0, object);
        let unknown = violations.iter().any(|violation| violation.starts_with("unknown field"));
        match (violations.is_empty(), unknown) {
            (true, _) => Ok(()),
            (_, true) => Err(Refused(400, "BadRequest", format!("strict decoding error: {}", violations.join(", ")))),
            _ => Err(Refused(422, "Invalid", violations.join(", "))),
        }
    }

    /// Rules of workloads, as upstream has them in CEL.
    fn check_rules(&self, key: &Key, object: &Value) -> Result<(), Refused> {
        let (before, after) = (&self.objects[key]["status"], &object["status"]);
        let names = |status: &Value| (status["clusterName"].clone(), status["nominatedClusterNames"].clone());
        let ((old, _), (new, nominated)) = (names(before), names(after));
        let nominates = nominated.as_array().is_some_and(|names| !names.is_empty());
        if !new.is_null() && nominates {
            let text = "status: clusterName and nominatedClusterNames are mutually exclusive".to_owned();
            return Err(Refused(422, "Invalid", text));
        }
        if !old.is_null() && !new.is_null() && old != new {
            return Err(Refused(422, "Invalid", "status: clusterName is immutable once set".to_owned()));
        }
        Ok(())
    }

    fn put(&mut self, key: &Key, mut object: Value, kind: &'static str) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let before = self.objects.insert(key.clone(), object.clone()).unwrap_or_default();
        let change = Change { version: self.version, plural: key.0.clone(), kind, object: object.clone(), before };
        self.changes.push(change);
        object
    }
}

/// Checks that a write was made for the object as it is.
fn check_version(object: &Value, write: &Value) -> Result<(), Refused> {
    for field in ["resourceVersion", "uid"] {
        let wanted = &write["metadata"][field];
        if !wanted.is_null() && *wanted != object["metadata"][field] {
            let text = format!("the object has been modified: {field} is {}", object["metadata"][field]);
            return Err(Refused(409, "Conflict", text));
        }
    }
    Ok(())
}

fn managers_of(object: &Value) -> BTreeMap<(String, &'static str), BTreeSet<Path>> {
    let entries = object["metadata"]["managedFields"].as_array().into_iter().flatten();
    let entry = |entry: &Value| {
        let operation = if entry["operation"] == "Apply" { "Apply" } else { "Update" };
        let manager = entry["manager"].as_str().unwrap().to_owned();
        ((manager, operation), paths_of(&entry["fieldsV1"]["f:status"]))
    };
    entries.map(entry).collect()
}

fn merge(value: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *value = patch.clone();
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    for (name, patch) in fields {
        if patch.is_null() {
            value.as_object_mut().unwrap().remove(name);
        } else {
            merge(&mut value[name], patch);
        }
    }
}
