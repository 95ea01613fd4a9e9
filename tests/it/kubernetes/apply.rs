//! Server-side apply (<https://kubernetes.io/docs/reference/using-api/server-side-apply/>): who manages which fields, and merges.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::schema::Schema;

/// Steps to a field, as `managedFields` has them.
pub(super) type Path = Vec<String>;

/// Paths of the leaves of `value`.
pub(super) fn leaves(schema: Schema<'_>, value: &Value) -> BTreeSet<Path> {
    let mut found = BTreeSet::new();
    collect(schema, value, &mut Vec::new(), &mut found);
    found
}

fn collect(schema: Schema<'_>, value: &Value, at: &mut Path, found: &mut BTreeSet<Path>) {
    match value {
        Value::Object(fields) if schema.merges() && !fields.is_empty() => {
            for (name, value) in fields {
                at.push(format!("f:{name}"));
                collect(schema.field(name).expect("fields are checked"), value, at, found);
                at.pop();
            }
        }
        Value::Array(items) if schema.keys().is_some() => {
            for item in items {
                at.push(key_of(schema, item));
                collect(schema.items(), item, at, found);
                at.pop();
            }
        }
        _ => drop(found.insert(at.clone())),
    }
}

fn key_of(schema: Schema<'_>, item: &Value) -> String {
    let keys = schema.keys().unwrap().into_iter();
    let keys: Map<String, Value> = keys.map(|key| (key.to_owned(), item[key].clone())).collect();
    format!("k:{}", Value::from(keys))
}

/// Value at a path.
pub(super) fn at<'a>(value: &'a Value, path: &[String]) -> Option<&'a Value> {
    let Some((step, rest)) = path.split_first() else { return Some(value) };
    let next = match step.split_once(':').unwrap() {
        ("f", name) => value.get(name)?,
        (_, keys) => &value.as_array()?[index(value, keys)?],
    };
    at(next, rest)
}

fn index(list: &Value, keys: &str) -> Option<usize> {
    let keys: Map<String, Value> = serde_json::from_str(keys).unwrap();
    list.as_array()?.iter().position(|item| keys.iter().all(|(key, value)| item.get(key) == Some(value)))
}

/// Sets the value at a path; lists grow at their end.
pub(super) fn set(value: &mut Value, path: &[String], to: Value) {
    let Some((step, rest)) = path.split_first() else {
        *value = to;
        return;
    };
    let next = match step.split_once(':').unwrap() {
        ("f", name) => {
            if !value.is_object() {
                *value = json!({});
            }
            value.as_object_mut().unwrap().entry(name).or_insert(Value::Null)
        }
        (_, keys) => {
            if !value.is_array() {
                *value = json!([]);
            }
            let place = index(value, keys).unwrap_or_else(|| {
                value.as_array_mut().unwrap().push(serde_json::from_str(keys).unwrap());
                value.as_array().unwrap().len() - 1
            });
            &mut value[place]
        }
    };
    set(next, rest, to);
}

/// Removes the value at a path, and what is empty then.
pub(super) fn remove(value: &mut Value, path: &[String]) {
    let Some((step, rest)) = path.split_first() else { return };
    match step.split_once(':').unwrap() {
        ("f", name) => {
            let Some(fields) = value.as_object_mut() else { return };
            if let Some(inner) = fields.get_mut(name).filter(|_| !rest.is_empty()) {
                remove(inner, rest);
            }
            if rest.is_empty() || fields.get(name).is_some_and(is_empty) {
                fields.remove(name);
            }
        }
        (_, keys) => {
            let Some(place) = index(value, keys) else { return };
            let own: Map<String, Value> = serde_json::from_str(keys).unwrap();
            // By its keys it is found, so they go last: with the item, once nothing else is left of it.
            let is_key = rest.len() == 1 && own.contains_key(&rest[0][2..]);
            if !is_key {
                remove(&mut value[place], rest);
            }
            if value[place].as_object() == Some(&own) {
                value.as_array_mut().unwrap().remove(place);
            }
        }
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// `fieldsV1` of a set of paths.
pub(super) fn fields_v1(paths: &BTreeSet<Path>) -> Value {
    let mut fields = json!({});
    for path in paths {
        let mut inner = &mut fields;
        for step in path {
            inner = inner.as_object_mut().unwrap().entry(step).or_insert_with(|| json!({}));
        }
    }
    fields
}

/// Paths of a `fieldsV1`.
pub(super) fn paths_of(fields: &Value) -> BTreeSet<Path> {
    fn walk(fields: &Value, at: &mut Path, found: &mut BTreeSet<Path>) {
        let fields = fields.as_object().unwrap();
        if fields.is_empty() {
            found.insert(at.clone());
        }
        for (step, inner) in fields {
            at.push(step.clone());
            walk(inner, at, found);
            at.pop();
        }
    }
    let mut found = BTreeSet::new();
    walk(fields, &mut Vec::new(), &mut found);
    found
}
