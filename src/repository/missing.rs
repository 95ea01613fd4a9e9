//! Errors about a missing name or run, with suggestions of similar ones.

use std::collections::BTreeMap;
use std::fmt::Display;

use super::log::RefValue;
use crate::error::Error;
use crate::name::Name;
use crate::spelling::edits;

/// Maximum number of suggested names.
const OFFERED_MAX: usize = 3;
/// Maximum edit distance of a suggested name, independent of its length.
const EDITS_MAX: usize = 4;

/// Error for `name`, which is not in `refs`, the names of the repository at `place` that the caller may read.
#[must_use]
pub fn no_such_name(refs: &BTreeMap<Name, RefValue>, name: &Name, place: impl Display) -> Error {
    absent_name(|| refs.keys(), name, place)
}

/// As [`no_such_name`], where the caller may read `names`, in order.
pub(crate) fn absent_name<'a, N>(names: impl Fn() -> N, name: &Name, place: impl Display) -> Error
where
    N: Iterator<Item = &'a Name>,
{
    let what = format!("no such name `{name}` in {place}");
    let is_run = names().any(|other| other.step().is_some_and(|(run, _)| run == *name));
    if is_run {
        return Error::not_found(format!("{what}; `{name}` is a run: try `{name}@latest`"))
            .help(format!("`towline runs {name}` lists its steps"));
    }
    let below: Vec<&Name> = names().filter(|other| other.is_under(name)).collect();
    let detail = match below.as_slice() {
        [] => None,
        [one] => Some(format!("the name below it is `{one}`")),
        several => Some(format!("{} names begin with `{name}/`", several.len())),
    };
    if let Some(detail) = detail {
        return Error::not_found(format!("{what}; {detail}"))
            .help(format!("`towline ls {name}` lists what is below it"));
    }
    let offered = match name.step() {
        Some((run, number)) => nearest_steps(names(), &run, number),
        None => Vec::new(),
    };
    let offered = if offered.is_empty() { nearest(names().map(Name::as_str), name.as_str()) } else { offered };
    Error::not_found(with_offers(what, &offered)).help("`towline ls` lists the names")
}

/// Error for the run `name`, which has no step among `names`, those that the caller may read, in order.
pub(super) fn absent_run<'a, N>(names: impl Fn() -> N, name: &Name) -> Error
where
    N: Iterator<Item = &'a Name>,
{
    if names().any(|other| other == name) {
        return Error::not_found(format!("no such run `{name}`; `{name}` is a name: use it without @"))
            .help("a run is the names RUN/step-N; `towline runs` lists the runs");
    }
    let mut runs: Vec<String> = names().filter_map(Name::step).map(|(run, _)| run.to_string()).collect();
    runs.dedup();
    let offered = nearest(runs.iter().map(String::as_str), name.as_str());
    Error::not_found(with_offers(format!("no such run `{name}`"), &offered))
        .expected(format!("names {name}/step-N"))
        .help("`towline runs` lists the runs")
}

fn with_offers(what: String, offered: &[String]) -> String {
    match offered {
        [] => what,
        [one] => format!("{what}; the nearest is {one}"),
        several => format!("{what}; the nearest are {}", several.join(", ")),
    }
}

/// Steps of `run` with numbers nearest to `number`.
fn nearest_steps<'a>(names: impl Iterator<Item = &'a Name>, run: &Name, number: u64) -> Vec<String> {
    let mut steps: Vec<(u64, &Name)> =
        names.filter_map(|name| Some((name.step().filter(|(of, _)| of == run)?.1.abs_diff(number), name))).collect();
    steps.sort_unstable();
    steps.iter().take(OFFERED_MAX).map(|(_, name)| format!("`{name}`")).collect()
}

/// Names similar to `wanted`, the closest ones.
fn nearest<'a>(names: impl Iterator<Item = &'a str>, wanted: &str) -> Vec<String> {
    let most = (wanted.len() / 3).clamp(1, EDITS_MAX);
    let mut alike: Vec<(usize, &str)> =
        names.filter_map(|name| Some((edits(name.as_bytes(), wanted.as_bytes(), most)?, name))).collect();
    alike.sort_unstable();
    alike.dedup();
    alike.iter().take(OFFERED_MAX).map(|(_, name)| format!("`{name}`")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::runs::tests::{name, value};
    use super::*;

    fn refs(names: &[&str]) -> BTreeMap<Name, RefValue> {
        names.iter().map(|text| (name(text), value(1, &[]))).collect()
    }

    fn said(names: &[&str], wanted: &str) -> String {
        no_such_name(&refs(names), &name(wanted), "/x").to_string()
    }

    fn no_such_run(names: &[&str], wanted: &str) -> Error {
        let refs = refs(names);
        absent_run(|| refs.keys(), &name(wanted))
    }

    #[test]
    fn a_run_is_named_with_its_latest_step() {
        let error = no_such_name(&refs(&["r/step-1", "r/step-2"]), &name("r"), "/x");
        assert_eq!(error.to_string(), "no such name `r` in /x; `r` is a run: try `r@latest`");
        assert_eq!(error.help_text(), Some("`towline runs r` lists its steps"));
        let error = no_such_run(&["best", "run-7/step-1", "run-7/step-2"], "run7");
        assert!(error.to_string().starts_with("no such run `run7`; the nearest is `run-7`"), "{error}");
        let error = no_such_run(&["best"], "best");
        assert!(error.to_string().contains("`best` is a name: use it without @"), "{error}");
    }

    #[test]
    fn the_nearest_names_are_offered() {
        let names =
            ["models/base", "models/best", "run/step-10", "run/step-90", "run/step-100", "run/step-1000", "zebra"];
        for (wanted, expected) in [
            ("models/bas", "; the nearest are `models/base`, `models/best`"),
            ("model/base", "; the nearest are `models/base`, `models/best`"),
            ("run/step-95", "; the nearest are `run/step-100`, `run/step-90`, `run/step-10`"),
            ("zbera", ""),
            ("zebr", "; the nearest is `zebra`"),
            ("nothing-like-it", ""),
            ("models", "; 2 names begin with `models/`"),
        ] {
            assert_eq!(said(&names, wanted), format!("no such name `{wanted}` in /x{expected}"), "{wanted}");
        }
    }

    #[test]
    fn edits_are_counted_up_to_a_limit() {
        let count = |a: &str, b: &str, most| edits(a.as_bytes(), b.as_bytes(), most);
        assert_eq!(count("", "", 0), Some(0));
        assert_eq!(count("kitten", "sitting", 3), Some(3));
        assert_eq!(count("kitten", "sitting", 2), None);
        assert_eq!(count("abc", "abcdef", 2), None);
        assert_eq!(count("", "ab", 2), Some(2));
    }
}
