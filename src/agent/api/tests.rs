//! The description of the API.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::auth::{OPEN, REMOTE};
use super::description::DESCRIPTION;
use super::rights::{NEEDS, Need};
use crate::error::ErrorKind;

pub(super) fn described() -> Value {
    serde_json::from_str(&DESCRIPTION).unwrap()
}

/// The operations that are described, by `METHOD path`.
fn operations(described: &Value) -> BTreeMap<String, &Value> {
    let mut all = BTreeMap::new();
    for (path, item) in described["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            all.insert(format!("{} {path}", method.to_uppercase()), operation);
        }
    }
    all
}

#[test]
fn rights_are_those_of_paths_that_there_are() {
    let described = described();
    let operations = operations(&described);
    for (method, path) in REMOTE {
        assert!(operations.contains_key(&format!("{method} {path}")), "{method} {path}");
    }
    for path in OPEN {
        assert!(operations.contains_key(&format!("GET {path}")), "{path}");
    }
}

/// S12 of docs/security.md: a route that nobody decided about fails here.
#[test]
fn every_route_says_what_it_needs_of_a_token() {
    let described = described();
    let operations = operations(&described);
    for (operation, item) in &operations {
        let mut found = NEEDS.iter().filter(|(method, path, _)| *operation == format!("{method} {path}"));
        let (_, path, need) = found.next().unwrap_or_else(|| panic!("{operation} has no entry in NEEDS"));
        assert!(found.next().is_none(), "{operation} has two");
        assert_eq!(*need == Need::Nothing, OPEN.contains(path), "{operation}");
        assert_eq!(item["x-towline-scope"].is_null(), *need == Need::Nothing, "{operation}");
    }
    assert_eq!(operations.len(), NEEDS.len(), "an entry is of no route");
}

#[test]
fn tokens_are_not_for_other_agents() {
    assert!(REMOTE.iter().all(|(_, path)| !path.starts_with("/v1/tokens")));
}

#[test]
fn what_is_open_and_what_others_may_ask_is_described_as_such() {
    let described = described();
    for (operation, item) in operations(&described) {
        let (method, path) = operation.split_once(' ').unwrap();
        assert_eq!(item["security"] == serde_json::json!([]), OPEN.contains(&path), "{operation}");
        let remote = REMOTE.contains(&(method, path));
        assert_eq!(item["x-towline-remote"] == true, remote, "{operation}");
        assert_eq!(item["responses"]["429"]["$ref"] == "#/components/responses/Busy", remote, "{operation}");
        let failed = &item["responses"]["default"]["content"]["application/json"]["schema"]["$ref"];
        assert_eq!(failed, "#/components/schemas/Failed", "{operation}");
        assert!(item["summary"].is_string(), "{operation}");
    }
    assert_eq!(described["openapi"], "3.1.0");
}

#[test]
fn names_of_operations_are_unique_and_schemas_are_there() {
    let described = described();
    let operations = operations(&described);
    let ids: BTreeSet<_> = operations.values().map(|item| item["operationId"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), operations.len());
    let schemas = described["components"]["schemas"].as_object().unwrap();
    let named: BTreeSet<&str> =
        DESCRIPTION.split("\"#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(named, schemas.keys().map(String::as_str).collect());
}

#[test]
fn requests_take_no_other_members() {
    let described = described();
    for name in ["Save", "Restore", "Fetch", "Warm", "Pinning", "Evicting", "Announcement", "TokenRequest"] {
        let schema = &described["components"]["schemas"][name];
        assert_eq!(schema["additionalProperties"], false, "{name}");
        let documented = |(member, of): (&String, &Value)| {
            assert!(of["description"].is_string() || of["oneOf"].is_array(), "{name}.{member}: {of}");
        };
        schema["properties"].as_object().unwrap().iter().for_each(documented);
    }
}

#[test]
fn kinds_of_errors_have_their_words() {
    let described = described();
    let words = described["components"]["schemas"]["ErrorKind"]["enum"].as_array().unwrap();
    assert_eq!(words.len(), 11);
    for word in words {
        let word = word.as_str().unwrap();
        assert_eq!(ErrorKind::from_word(word).word(), word);
    }
}
