//! Schemas of objects: what an API server accepts, and how lists merge.

use serde_json::Value;

/// Schemas of the parts of a kind.
pub(super) struct Schemas(Value);

/// Schema of a value.
#[derive(Clone, Copy)]
pub(super) struct Schema<'a> {
    all: &'a Value,
    own: &'a Value,
}

impl Schemas {
    pub(super) fn read() -> Self {
        Self(serde_json::from_str(include_str!("schema.json")).unwrap())
    }

    /// True if there is such a kind.
    pub(super) fn know(&self, plural: &str) -> bool {
        self.0.get(plural).is_some()
    }

    /// Schema of `spec` or `status`.
    pub(super) fn part(&self, plural: &str, part: &str) -> Schema<'_> {
        Schema { all: &self.0, own: &self.0[plural][part] }.resolved()
    }

    /// Violations of the schema by an object.
    pub(super) fn violations(&self, plural: &str, object: &Value) -> Vec<String> {
        let mut found = Vec::new();
        for key in object.as_object().unwrap().keys() {
            match key.as_str() {
                "apiVersion" | "kind" | "metadata" => {}
                "spec" | "status" => self.part(plural, key).check(&object[key.as_str()], key, &mut found),
                other => found.push(format!("unknown field {other:?}")),
            }
        }
        found
    }
}

impl<'a> Schema<'a> {
    fn resolved(self) -> Self {
        match self.own["$ref"].as_str() {
            Some(name) => Self { own: &self.all["definitions"][name], ..self }.resolved(),
            None => self,
        }
    }

    /// Schema of a field; none for one that is unknown.
    pub(super) fn field(self, name: &str) -> Option<Self> {
        let own = self.own["properties"].get(name).or_else(|| self.own.get("additionalProperties"))?;
        Some(Self { own, ..self }.resolved())
    }

    pub(super) fn items(self) -> Self {
        Self { own: &self.own["items"], ..self }.resolved()
    }

    /// Keys of the items of a list that merges; none for other lists and values, which are replaced as a whole.
    pub(super) fn keys(self) -> Option<Vec<&'a str>> {
        let keys = self.own["keys"].as_array()?;
        Some(keys.iter().filter_map(Value::as_str).collect())
    }

    /// True for an object whose fields merge.
    pub(super) fn merges(self) -> bool {
        self.own["type"] == "object"
    }

    fn check(self, value: &Value, at: &str, found: &mut Vec<String>) {
        if self.own["any"] == true {
            return;
        }
        let len = |len: usize, found: &mut Vec<String>| {
            for (least, most) in [("minLength", "maxLength"), ("minItems", "maxItems")] {
                let too = |limit: &str, less: bool| {
                    self.own[limit]
                        .as_u64()
                        .is_some_and(|limit| if less { (len as u64) < limit } else { len as u64 > limit })
                };
                if too(least, true) || too(most, false) {
                    found.push(format!("{at}: length {len}"));
                }
            }
        };
        match (self.own["type"].as_str().unwrap(), value) {
            ("object", Value::Object(fields)) => {
                for required in self.own["required"].as_array().into_iter().flatten() {
                    if !fields.contains_key(required.as_str().unwrap()) {
                        found.push(format!("{at}.{}: required value", required.as_str().unwrap()));
                    }
                }
                for (name, value) in fields {
                    match self.field(name) {
                        Some(schema) => schema.check(value, &format!("{at}.{name}"), found),
                        None => found.push(format!("unknown field \"{at}.{name}\"")),
                    }
                }
            }
            ("array", Value::Array(items)) => {
                len(items.len(), found);
                items.iter().enumerate().for_each(|(n, item)| self.items().check(item, &format!("{at}[{n}]"), found));
            }
            ("string", Value::String(text)) => {
                len(text.chars().count(), found);
                let options = self.own["enum"].as_array();
                if options.is_some_and(|options| !options.contains(value)) {
                    found.push(format!("{at}: unsupported value {text:?}"));
                }
                let is_time = || text.len() == 20 && text.ends_with('Z') && text.as_bytes()[10] == b'T';
                if self.own["format"] == "date-time" && !is_time() {
                    found.push(format!("{at}: not a date-time: {text:?}"));
                }
            }
            ("integer", Value::Number(number)) => {
                let number = number.as_i64().unwrap_or(i64::MIN);
                let below = self.own["minimum"].as_i64().is_some_and(|least| number < least);
                if below || self.own["maximum"].as_i64().is_some_and(|most| number > most) {
                    found.push(format!("{at}: out of range: {number}"));
                }
            }
            ("boolean", Value::Bool(_)) => {}
            (expected, got) => found.push(format!("{at}: expected {expected}, got {got}")),
        }
    }
}
