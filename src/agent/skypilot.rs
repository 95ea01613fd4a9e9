//! Admin policy of `SkyPilot`: rewrites the places that a task may run at to those where its data may go, the best first.
//! Pure: `api/skypilot.rs` asks for the hint.
//!
//! A request is a JSON string that holds JSON that holds YAML, and so is the answer; a rejection has status 400
//! (<https://github.com/skypilot-org/skypilot/blob/master/sky/admin_policy.py>, read in version 0.14.1).

use std::collections::HashSet;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::placement::{Candidate, Hint, HintRequest, HintVerdict, INPUTS_MAX, Mode, Objective, Sites, Workload};

/// Variable of a task: the names that it reads, separated by commas.
const INPUTS: &str = "TOWLINE_INPUTS";
/// Variable of a task: `time` (default), `cost` or `weighted`.
const OBJECTIVE: &str = "TOWLINE_OBJECTIVE";
/// Variable of a task: dollars that an hour of waiting is worth.
const USD_PER_HOUR: &str = "TOWLINE_USD_PER_HOUR";
/// Key of a task with its resources.
const RESOURCES: &str = "resources";
/// Keys of a task's resources with a list of choices.
const CHOICES: [&str; 2] = ["ordered", "any_of"];
/// Any cloud, region or zone, in the notation of `infra`.
const ANY: &str = "*";
/// Maximum number of choices that a task gets.
const CHOICES_MAX: usize = 4096;
/// Maximum number of values in a request.
const VALUES_MAX: usize = 20_000;
/// Maximum number of values in the choices that a task gets.
const CHOSEN_VALUES_MAX: usize = 100_000;
/// Limit of the bytes that aliases in a task stand for, if each stands for a text as long as the task.
const ALIASED_BYTES_MAX: usize = 1 << 20;
/// Values of a choice beside those of the task: itself and its place.
const CHOICE_VALUES: usize = 3;
/// Bytes of memory of a value, at most: a third of an object with one member.
const VALUE_MEMORY: u64 = 256;
/// Memory of a call, as a multiple of its length: the body, the strings in it, and the answer.
const CALL_WEIGHT: u64 = 6;

/// Request of a user. Other fields do not matter here.
#[derive(Debug, Deserialize)]
struct UserRequest {
    task: String,
    skypilot_config: String,
    #[serde(default)]
    user: String,
}

/// Answer to a request.
#[derive(Debug, Serialize)]
struct MutatedRequest<'a> {
    task: &'a str,
    skypilot_config: &'a str,
}

/// A task to be placed.
#[derive(Debug)]
pub(super) struct SkyPilotTask {
    request: UserRequest,
    /// None: it has no inputs.
    reading: Option<ReadingTask>,
}

/// A task that reads names.
#[derive(Debug)]
struct ReadingTask {
    resources: Map<String, Value>,
    nodes: u64,
    /// Bytes of the lines with the resources. Those around them stay as they are: readers of YAML do not agree on every value.
    block: Range<usize>,
    user: Option<String>,
    inputs: Vec<String>,
    objective: Objective,
}

/// The parts of a task that count.
#[derive(Debug, Deserialize)]
struct TaskParts {
    envs: Option<Value>,
    resources: Option<Value>,
    num_nodes: Option<Value>,
}

/// The parts of a user that count.
#[derive(Debug, Deserialize)]
struct User {
    name: Option<Value>,
}

/// Bytes of memory that a body of `len` bytes takes, until it is answered.
pub(super) fn memory_of(len: usize) -> u64 {
    let values = len.min(VALUES_MAX) + aliased_max(len);
    (len as u64).saturating_mul(CALL_WEIGHT) + values as u64 * VALUE_MEMORY + ALIASED_BYTES_MAX as u64
}

/// Limit of the values that aliases stand for in a text of `len` bytes.
fn aliased_max(len: usize) -> usize {
    (ALIASED_BYTES_MAX / len.max(1)).min(len).min(VALUES_MAX)
}

impl SkyPilotTask {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// Usage, if it is not one of `SkyPilot`, or a variable of the task is malformed.
    pub(super) fn read(body: &[u8]) -> Result<Self> {
        let malformed = || Error::usage("request body is not one of SkyPilot for an admin policy");
        let text: String = serde_json::from_slice(body).map_err(|source| malformed().source(source))?;
        let request: UserRequest = serde_json::from_str(&text).map_err(|source| malformed().source(source))?;
        // A task that does not name the variable reads nothing, whatever else it has.
        let reading = if request.task.contains(INPUTS) { ReadingTask::of(&request.task, &request.user)? } else { None };
        Ok(Self { request, reading })
    }

    /// User who asks; none: unknown.
    pub(super) fn user(&self) -> Option<&str> {
        self.reading.as_ref()?.user.as_deref()
    }

    /// Names that it reads; empty: there is nothing to say.
    pub(super) fn inputs(&self) -> &[String] {
        self.reading.as_ref().map_or(&[], |task| &task.inputs)
    }

    /// The request for a hint about all sites.
    pub(super) fn hint_request(&self) -> HintRequest {
        let reading = self.reading.as_ref();
        HintRequest {
            workload: Workload { gpus: reading.map_or(0, ReadingTask::gpus), ..Workload::default() },
            objective: reading.map(|task| task.objective.clone()).unwrap_or_default(),
            ..HintRequest::about(self.inputs())
        }
    }

    /// The answer that changes nothing.
    pub(super) fn unchanged(&self) -> Result<String> {
        answer(&self.request.task, &self.request.skypilot_config)
    }

    /// Bytes of memory that [`Self::with_places`] takes beside those of the call, at most.
    pub(super) fn memory_with_places(&self, sites: &Sites) -> u64 {
        let Some(reading) = &self.reading else { return 0 };
        let own: usize = reading.resources.values().map(values).sum();
        // A choice has at least one value of its own.
        let each = own * (1 + CHOICE_VALUES) + CHOICE_VALUES;
        // They are made, and read again once they are written.
        let chosen = each.saturating_mul(sites.sites().count() + 1).min(CHOSEN_VALUES_MAX) + own;
        2 * VALUE_MEMORY * chosen as u64
    }

    /// The answer with the places where the data may go, the best first.
    ///
    /// # Errors
    /// Denied, with the rules, if there is none.
    pub(super) fn with_places(&self, hint: &Hint, sites: &Sites) -> Result<String> {
        let Some(reading) = &self.reading else { return self.unchanged() };
        let mut resources = reading.resources.clone();
        let choices = chosen(&mut resources, hint, sites);
        if choices.is_empty() {
            return Err(refused(hint));
        }
        resources.insert("ordered".to_owned(), choices.into_iter().map(Value::Object).collect());
        // JSON is YAML.
        let block = format!("{RESOURCES}: {}\n", Value::Object(resources));
        let task = &self.request.task;
        let (before, after) = (&task[..reading.block.start], &task[reading.block.end..]);
        let end = |text: &str| if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
        let text = [before, end(before), &block, after, end(after)].concat();
        if yaml::<TaskParts>(&text, CHOSEN_VALUES_MAX + VALUES_MAX).is_none() {
            return Err(unreadable());
        }
        answer(&text, &self.request.skypilot_config)
    }
}

impl ReadingTask {
    /// Reads a task; none if it has no inputs.
    fn of(text: &str, user: &str) -> Result<Option<Self>> {
        let task: TaskParts = yaml(text, VALUES_MAX).ok_or_else(unreadable)?;
        let block = block_of(text).ok_or_else(unreadable)?;
        let variables = task.envs.as_ref().and_then(Value::as_object);
        let told = |key: &str| {
            let value = variables.and_then(|variables| variables.get(key))?;
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            Some(text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        let wrong = |key: &'static str, expected: &'static str, got: String| {
            Error::usage("variable of the task is malformed").at(key).expected(expected).got(got)
        };
        let Some(names) = told(INPUTS) else { return Ok(None) };
        let inputs: Vec<String> =
            names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
        if inputs.len() > INPUTS_MAX {
            return Err(wrong(INPUTS, "at most 256 names", inputs.len().to_string()));
        }
        let mode = match told(OBJECTIVE) {
            None => Mode::default(),
            Some(text) => text.parse().map_err(|_| wrong(OBJECTIVE, "time, cost or weighted", text))?,
        };
        let usd_per_hour = match told(USD_PER_HOUR) {
            None => 0.0,
            Some(text) => text.parse().map_err(|_| wrong(USD_PER_HOUR, "dollars", text))?,
        };
        if let Some(number) = task.resources.as_ref().and_then(|value| changed_number(value, &text[block.clone()])) {
            return Err(Error::usage("number in the resources of the task is not in decimal notation")
                .got(number)
                .help("write it as 0.5 or 300, or quote it if it is a text"));
        }
        let user = yaml::<User>(user, VALUES_MAX).and_then(|user| Some(user.name?.as_str()?.to_owned()));
        let objective = Objective { mode, usd_per_hour, ..Objective::default() };
        let nodes = task.num_nodes.as_ref().and_then(Value::as_u64).unwrap_or(1);
        let resources = match task.resources {
            Some(Value::Object(resources)) => resources,
            _ => Map::new(),
        };
        Ok(Some(Self { resources, nodes, block, user, inputs, objective }))
    }

    /// GPUs of all nodes: `H100:8`, or `{H100: 8}`; of several choices the first counts.
    fn gpus(&self) -> u64 {
        let listed = CHOICES.iter().find_map(|key| self.resources.get(*key)?.get(0)?.get("accelerators"));
        let accelerators = self.resources.get("accelerators").or(listed);
        let each = match accelerators {
            Some(Value::String(text)) => text.split_once(':').map_or(Some(1), |(_, count)| count.trim().parse().ok()),
            Some(Value::Object(map)) => map.values().next().and_then(Value::as_u64),
            _ => None,
        };
        each.unwrap_or(0).saturating_mul(self.nodes)
    }
}

/// Reads a YAML text of at most `values_max` values; none if it is not understood. Few bytes can stand for many values by aliases, which
/// a task has that names one thing twice: so they stand for at most as many values as the text has bytes, and for
/// [`ALIASED_BYTES_MAX`].
fn yaml<T: DeserializeOwned>(text: &str, values_max: usize) -> Option<T> {
    serde_saphyr::from_str_with_options(text, yaml_options(text.len(), values_max)).ok()
}

/// Options to read a YAML text of `len` bytes. Without excerpts in errors: for them the parser lists the place of each line,
/// which takes many times the memory of a text with short lines.
fn yaml_options(len: usize, values_max: usize) -> serde_saphyr::Options {
    serde_saphyr::options! {
        with_snippet: false,
        budget: serde_saphyr::budget! { max_nodes: values_max },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: aliased_max(len),
        },
    }
}

/// Number of values in one, itself included.
fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(values).sum(),
        Value::Object(map) => map.values().map(|value| 1 + values(value)).sum(),
        _ => 0,
    }
}

fn unreadable() -> Error {
    Error::usage("task cannot be read, so its places cannot be chosen")
        .expected("YAML as SkyPilot writes it: keys of the task begin lines, few aliases, no tags")
        .help("simplify the task, or leave out TOWLINE_INPUTS")
}

/// Bytes of the lines with the resources, of a mapping as `SkyPilot` dumps it: its keys begin lines. They are empty, at the end, if
/// there are none. None if it is not such a mapping.
fn block_of(text: &str) -> Option<Range<usize>> {
    let is_key =
        |line: &str| line.starts_with(|letter: char| !letter.is_whitespace() && letter != '-' && letter != '#');
    let is_plain = |line: &str| {
        !line.starts_with(['{', '}', '[', ']', '&', '*', '!', '%', '?', '"', '\''])
            && !line.starts_with("---")
            && !line.starts_with("...")
    };
    let is_resources = |line: &str| line.strip_prefix(RESOURCES).is_some_and(|rest| rest.starts_with(':'));
    let (mut block, mut at, mut within) = (None, 0, false);
    for line in text.split_inclusive('\n') {
        if !is_plain(line) {
            return None;
        }
        let end = at + line.len();
        if is_resources(line) {
            if block.is_some() {
                return None;
            }
            (block, within) = (Some(at..end), true);
        } else if is_key(line) {
            within = false;
        } else if within && let Some(block) = &mut block {
            block.end = end;
        }
        at = end;
    }
    Some(block.unwrap_or(at..at))
}

/// A number of `value` that is not in `text` as JSON writes it, so that `SkyPilot` may have taken it for something else.
fn changed_number(value: &Value, text: &str) -> Option<String> {
    fn collect(value: &Value, numbers: &mut HashSet<String>) {
        match value {
            Value::Number(number) => drop(numbers.insert(number.to_string())),
            Value::Array(list) => list.iter().for_each(|value| collect(value, numbers)),
            Value::Object(map) => map.values().for_each(|value| collect(value, numbers)),
            _ => {}
        }
    }
    let mut numbers = HashSet::new();
    collect(value, &mut numbers);
    let is_between = |letter: char| !(letter.is_ascii_alphanumeric() || "+-._".contains(letter));
    for word in text.split(is_between) {
        numbers.remove(word);
    }
    numbers.into_iter().min()
}

fn answer(task: &str, skypilot_config: &str) -> Result<String> {
    let encode = |source| Error::other("answer is not JSON").source(source);
    let inner = serde_json::to_string(&MutatedRequest { task, skypilot_config }).map_err(encode)?;
    serde_json::to_string(&inner).map_err(encode)
}

fn refused(hint: &Hint) -> Error {
    let denial = |candidate: &Candidate| {
        let rule = candidate.deny.first();
        rule.map(|denial| format!("{}: {:.100}: {:.200}", candidate.site, denial.input, denial.rule))
    };
    let denials: Vec<String> = hint.candidates.iter().filter_map(denial).take(8).collect();
    Error::denied("the data of the task may go to none of its places").got(denials.join("; "))
}

/// Choices of the task that remain, the best first, without those keys in `resources`.
fn chosen(resources: &mut Map<String, Value>, hint: &Hint, sites: &Sites) -> Vec<Map<String, Value>> {
    let listed = CHOICES.iter().find_map(|key| match resources.remove(*key) {
        Some(Value::Array(list)) => Some(list),
        _ => None,
    });
    let wanted: Vec<Map<String, Value>> = match listed {
        Some(list) => list.into_iter().filter_map(|one| one.as_object().cloned()).collect(),
        None => vec![Map::new()],
    };
    let of_all = Infra::take(resources);
    let places: Vec<(Infra, HintVerdict)> = hint
        .candidates
        .iter()
        .filter_map(|candidate| {
            let site = sites.site(&candidate.site)?;
            Some((Infra::parse(&site.infra()?), candidate.verdict))
        })
        .collect();
    // By the rank of the site, then in the order of the task.
    let mut choices: Vec<(usize, Map<String, Value>)> = Vec::new();
    let mut left = CHOSEN_VALUES_MAX;
    for one in wanted {
        let mut one = one;
        let size = one.values().map(values).sum::<usize>() + CHOICE_VALUES;
        let own = Infra::take(&mut one).or_else(|| of_all.clone()).unwrap_or_default();
        let mut described = false;
        for (rank, (place, verdict)) in places.iter().enumerate() {
            let Some(infra) = own.meet(place) else { continue };
            described = true;
            if *verdict == HintVerdict::Allow && choices.len() < CHOICES_MAX && size <= left {
                left -= size;
                let mut choice = one.clone();
                choice.insert("infra".to_owned(), infra.text().into());
                choices.push((rank, choice));
            }
        }
        // Places of which the sites file describes no part come last, if the data may go there; they need a name.
        let named = !described && !own.is_any() && hint.elsewhere == HintVerdict::Allow;
        if named && choices.len() < CHOICES_MAX && size <= left {
            left -= size;
            let mut choice = one;
            choice.insert("infra".to_owned(), own.text().into());
            choices.push((usize::MAX, choice));
        }
    }
    choices.sort_by_key(|(rank, _)| *rank);
    choices.into_iter().map(|(_, choice)| choice).collect()
}

/// A place in the notation of `infra`: cloud, region, zone; `*` or absent parts mean any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Infra(Vec<String>);

impl Infra {
    fn parse(text: &str) -> Self {
        Self::of(text.split('/').map(|part| part.trim().to_owned()).collect())
    }

    fn of(mut parts: Vec<String>) -> Self {
        // Names of Kubernetes contexts may have slashes.
        let is_kubernetes =
            parts.first().is_some_and(|cloud| ["k8s", "kubernetes"].contains(&cloud.to_lowercase().as_str()));
        if is_kubernetes {
            let context = parts.split_off(1).join("/");
            parts = vec!["k8s".to_owned()];
            parts.extend(Some(context).filter(|context| !context.is_empty()));
        }
        while parts.last().is_some_and(|part| part == ANY || part.is_empty()) {
            parts.pop();
        }
        Self(parts)
    }

    /// Takes the place out of resources, in the notation of today or of before: `cloud`, `region`, `zone`.
    fn take(resources: &mut Map<String, Value>) -> Option<Self> {
        let mut taken = |key: &str| resources.remove(key).and_then(|value| value.as_str().map(str::to_owned));
        let (infra, parts) = (taken("infra"), ["cloud", "region", "zone"].map(|key| taken(key).unwrap_or_default()));
        match infra {
            Some(infra) => Some(Self::parse(&infra)),
            None if parts.iter().all(String::is_empty) => None,
            None => Some(Self::of(
                parts.into_iter().map(|part| if part.is_empty() { ANY.to_owned() } else { part }).collect(),
            )),
        }
    }

    fn is_any(&self) -> bool {
        self.0.is_empty()
    }

    /// Cloud, region or zone; none: any.
    fn part(&self, place: usize) -> Option<&String> {
        self.0.get(place).filter(|part| *part != ANY)
    }

    /// The place that is in both; none if there is none.
    fn meet(&self, other: &Self) -> Option<Self> {
        let (len, mut parts) = (self.0.len().max(other.0.len()), Vec::new());
        // Names of zones begin with that of their region, but for those that are numbers.
        let zone_of = |one: &Self, other: &Self| match (one.part(2), one.part(1), other.part(1)) {
            (Some(zone), None, Some(region)) => {
                zone.bytes().all(|byte| byte.is_ascii_digit())
                    || zone.to_lowercase().starts_with(&region.to_lowercase())
            }
            _ => true,
        };
        if !zone_of(self, other) || !zone_of(other, self) {
            return None;
        }
        for place in 0..len {
            let part = |infra: &Self| infra.part(place).cloned();
            parts.push(match (part(self), part(other)) {
                (Some(one), Some(other)) if !one.eq_ignore_ascii_case(&other) => return None,
                (Some(one), _) | (None, Some(one)) => one,
                (None, None) => ANY.to_owned(),
            });
        }
        Some(Self(parts))
    }

    fn text(&self) -> String {
        self.0.join("/")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meet(one: &str, other: &str) -> Option<String> {
        Infra::parse(one).meet(&Infra::parse(other)).map(|both| both.text())
    }

    #[test]
    fn places_meet_where_both_are() {
        for (one, other, both) in [
            ("aws", "aws/us-east-1", Some("aws/us-east-1")),
            ("aws/us-east-1/us-east-1a", "aws/us-east-1", Some("aws/us-east-1/us-east-1a")),
            ("*/us-east-1", "aws/us-east-1", Some("aws/us-east-1")),
            ("aws/*/us-east-1a", "aws/us-east-1", Some("aws/us-east-1/us-east-1a")),
            ("aws/*/us-east-1a", "aws/us-west-2", None),
            ("azure/*/1", "azure/eastus", Some("azure/eastus/1")),
            ("", "aws/us-east-1", Some("aws/us-east-1")),
            ("AWS", "aws", Some("AWS")),
            ("gcp", "aws/us-east-1", None),
            ("aws/us-west-2", "aws/us-east-1", None),
            ("kubernetes", "k8s/arn:aws:eks/cluster/x", Some("k8s/arn:aws:eks/cluster/x")),
            ("k8s/a/b", "k8s/a/c", None),
        ] {
            assert_eq!(meet(one, other).as_deref(), both, "{one} {other}");
        }
        let mut before = Map::from_iter([("region".to_owned(), Value::from("us-east-1"))]);
        assert_eq!(Infra::take(&mut before).unwrap().text(), "*/us-east-1");
        assert!(before.is_empty() && Infra::take(&mut before).is_none());
    }

    #[test]
    fn requests_hold_json_that_holds_yaml() {
        let inner = serde_json::json!({
            "task": "name: t\nnum_nodes: 2\nenvs:\n  TOWLINE_INPUTS: run-7@latest, web\n  TOWLINE_OBJECTIVE: cost\n\
                     resources:\n  accelerators:\n    H100: 8\n",
            "skypilot_config": "{}",
            "request_name": "jobs.launch",
            "later_field": [1],
            "user": "id: abc\nname: alice\n",
        });
        let body = serde_json::to_vec(&inner.to_string()).unwrap();
        let task = SkyPilotTask::read(&body).unwrap();
        assert_eq!(
            (task.user(), task.inputs()),
            (Some("alice"), ["run-7@latest".to_owned(), "web".to_owned()].as_slice())
        );
        let request = task.hint_request();
        assert_eq!((request.workload.gpus, request.objective.mode), (16, Mode::Cost));
        let unchanged: String = serde_json::from_str(&task.unchanged().unwrap()).unwrap();
        let unchanged: Value = serde_json::from_str(&unchanged).unwrap();
        assert_eq!((&unchanged["task"], &unchanged["skypilot_config"]), (&inner["task"], &inner["skypilot_config"]));

        for (key, value) in [("TOWLINE_OBJECTIVE", "speed"), ("TOWLINE_USD_PER_HOUR", "much")] {
            let mut wrong = inner.clone();
            wrong["task"] = format!("envs: {{TOWLINE_INPUTS: a, {key}: {value}}}").into();
            assert!(SkyPilotTask::read(&serde_json::to_vec(&wrong.to_string()).unwrap()).is_err(), "{key}");
        }
        let of = |text: &str| {
            let mut other = inner.clone();
            other["task"] = text.into();
            SkyPilotTask::read(&serde_json::to_vec(&other.to_string()).unwrap())
        };
        for text in ["envs: {}", "[1, 2]", "a: ["] {
            assert!(of(text).unwrap().inputs().is_empty(), "{text}");
        }
        // One that reads names is understood, or rejected.
        for text in [
            "envs:\n  TOWLINE_INPUTS: a\nconfig:\n  x: [",
            "{envs: {TOWLINE_INPUTS: a}}",
            "---\nenvs:\n  TOWLINE_INPUTS: a\n",
            "- TOWLINE_INPUTS: a\n- {}\n- 1\n",
            "envs:\n  TOWLINE_INPUTS: a\nx: &a [1]\ny: [*a, *b]\n",
            "envs:\n  TOWLINE_INPUTS: a\nresources:\n  disk_size: 1e5\n",
            "envs:\n  TOWLINE_INPUTS: a\nresources:\n  labels:\n    x: 08\n",
        ] {
            assert!(of(text).is_err(), "{text}");
        }
        let text = "a: 1\nresources:\n- b\n  c: 2\nrun: |\n  x\n";
        assert_eq!(&text[block_of(text).unwrap()], "resources:\n- b\n  c: 2\n");
        assert_eq!(block_of("a: 1"), Some(4..4));
        assert_eq!(block_of("resources:\nresources:\n"), None);
        assert!(SkyPilotTask::read(b"{}").is_err() && SkyPilotTask::read(b"\"{}\"").is_err());
    }

    fn read(task: &str) -> Result<SkyPilotTask> {
        let inner = serde_json::json!({ "task": task, "skypilot_config": "{}", "user": "name: a\n" });
        SkyPilotTask::read(&serde_json::to_vec(&inner.to_string()).unwrap())
    }

    /// It would take minutes if each number were looked for in the text.
    #[test]
    fn a_task_with_very_many_numbers_is_read_in_linear_time() {
        let numbers: Vec<String> = (100_000..119_000).map(|number| number.to_string()).collect();
        let task = format!(
            "envs:\n  TOWLINE_INPUTS: a\nresources:\n  x: [{}]\n  y: \"{}\"\n",
            numbers.join(","),
            "1,".repeat(200_000)
        );
        assert_eq!(read(&task).unwrap().inputs(), ["a"]);
    }

    /// An excerpt of a text takes memory for each of its lines.
    #[test]
    fn an_error_of_a_task_has_no_excerpt_of_it() {
        for text in ["a: [\n\n\n", "- 1\n- 2\n", "a: *b\n"] {
            let error =
                serde_saphyr::from_str_with_options::<TaskParts>(text, yaml_options(text.len(), 1)).unwrap_err();
            assert!(!matches!(error, serde_saphyr::Error::WithSnippet { .. }), "{error}");
        }
    }

    #[test]
    fn few_bytes_that_stand_for_many_values_are_not_read() {
        let reads = "envs:\n  TOWLINE_INPUTS: a\n";
        for more in ["x: &a [1]\n", "x: &a 1\ny: *a\n", "a: &a {b: 1}\nc: {<<: *a}\n"] {
            assert!(read(&format!("{reads}{more}")).is_ok(), "{more}");
        }
        let bomb = |aliases: usize| format!("x: &a [1,2]\ny: &b [{}]\n", vec!["*a"; aliases].join(","));
        assert!(read(&format!("{reads}{}", bomb(10))).is_ok());
        for more in ["x: *a\n", &bomb(1000), &format!("x: &a {}\ny: [*a, *a]\n", "1".repeat(900_000))] {
            assert!(read(&format!("{reads}{more}")).is_err(), "{}", more.len());
        }
        let list = |count: usize| format!("{reads}x: [{}]\n", vec!["1"; count].join(","));
        assert!(read(&list(VALUES_MAX - 10)).is_ok());
        assert!(read(&list(VALUES_MAX)).is_err());
    }
}
