//! Policy: who may do what. Pure: rules and questions in, answers out; entry points and transfers ask before they act.

mod access;
mod addresses;
mod cases;
mod document;
mod labels;
mod rules;
mod scopes;
mod spiffe;
#[cfg(test)]
mod tests;

pub use self::access::{AllowList, AllowRule, Callers, agents, pattern_text};
pub use self::addresses::Prefix;
pub use self::cases::{CaseReport, Cases, CheckedCase, UntestedRule};
pub use self::document::POLICY_LEN_MAX;
pub(crate) use self::labels::LABEL_VALUE_WEIGHT;
pub use self::labels::{
    LABEL_KEYS, LABEL_VALUE_LEN_MAX, LABEL_VALUES_JOINED_MAX, LABEL_VALUES_MAX, Labels, Sensitivity,
};
pub use self::rules::{
    Basis, Conditions, LinkRule, LocalCaller, PolicyRules, Question, Route, Ruling, SiteRule, Verdict, WrittenRule,
};
pub use self::scopes::{Scope, Scopes};
pub use self::spiffe::SpiffeMap;
