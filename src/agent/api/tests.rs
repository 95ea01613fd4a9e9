//! The description of the API says what the API is.

use std::collections::BTreeSet;

use serde_json::Value;

use super::auth::{OPEN, REMOTE};
use super::{open, routes};

#[test]
fn the_description_has_every_path_and_method_and_no_other() {
    let described: Value = serde_json::from_str(open::DESCRIPTION).unwrap();
    let mut documented = BTreeSet::new();
    for (path, item) in described["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys().filter(|key| *key != "parameters") {
            documented.insert(format!("{} {path}", method.to_uppercase()));
        }
    }
    let served: BTreeSet<_> = routes()
        .into_iter()
        .flat_map(|(path, methods, _)| {
            methods.iter().map(move |method| format!("{method} {}", path.replace("{*", "{")))
        })
        .collect();
    assert_eq!(documented, served);
}

#[test]
fn what_is_open_is_described_as_such() {
    let described: Value = serde_json::from_str(open::DESCRIPTION).unwrap();
    for (path, item) in described["paths"].as_object().unwrap() {
        let open = item["get"]["security"].as_array().is_some_and(Vec::is_empty);
        assert_eq!(open, OPEN.contains(&path.as_str()), "{path}");
    }
}

#[test]
fn what_other_agents_may_ask_is_described_as_such() {
    let described: Value = serde_json::from_str(open::DESCRIPTION).unwrap();
    for (path, item) in described["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap().iter().filter(|(key, _)| *key != "parameters") {
            let remote = operation["x-towline-remote"] == true;
            let listed = REMOTE.contains(&(method.to_uppercase().as_str(), path.as_str()));
            assert_eq!(remote, listed, "{method} {path}");
            let busy = &operation["responses"]["429"]["$ref"];
            assert_eq!(busy == "#/components/responses/Busy", remote, "{method} {path}");
        }
    }
}

#[test]
fn every_schema_that_is_named_is_there() {
    let described: Value = serde_json::from_str(open::DESCRIPTION).unwrap();
    let schemas = described["components"]["schemas"].as_object().unwrap();
    let named: BTreeSet<&str> =
        open::DESCRIPTION.split("\"#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(named, schemas.keys().map(String::as_str).collect());
}
