//! Verdicts of a probe, computed from answers and stored bytes. Pure.
//!
//! Answers can be wrong (an acknowledged create whose bytes are missing), so the stored bytes decide. A failure (5xx, a lost
//! connection) alone is no verdict: the writer does not know the outcome, but the stored bytes show it.

use super::Verdict;

/// Answer to a conditional put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Done.
    Done,
    /// The condition does not hold.
    Conflict,
    /// The store has no such operation.
    Unsupported,
    /// No conclusive answer.
    Failed,
}

/// Writer whose bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    /// Bytes of this writer.
    Of(usize),
    /// No object.
    Nothing,
    /// Bytes of no writer.
    Other,
}

/// One race of creates for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Round {
    /// One writer's bytes are stored, and no other was told that it won.
    OneWinner,
    /// Several writers were told that they won, or one whose bytes are missing, or the stored bytes are of no writer.
    Broken,
    /// Inconclusive: every request failed.
    Unclear,
}

/// Verdict on two creates of one key, one after the other; `None` if the test must be repeated.
pub(super) fn twice(first: Answer, second: Answer, stored: Stored) -> Option<Verdict> {
    match (first, second, stored) {
        (Answer::Unsupported, _, _) | (_, Answer::Unsupported, _) => Some(Verdict::Refused),
        (_, Answer::Done, _) | (Answer::Done, _, Stored::Of(1) | Stored::Nothing | Stored::Other) => {
            Some(Verdict::Ignored)
        }
        (Answer::Conflict, _, _) => Some(Verdict::Refused),
        (Answer::Done, Answer::Conflict, Stored::Of(_)) => Some(Verdict::Works),
        (Answer::Done | Answer::Failed, Answer::Conflict | Answer::Failed, _) => None,
    }
}

/// Verdict on one race, by the answer to each writer and the stored bytes.
pub(super) fn round(answers: &[Answer], stored: Stored) -> Round {
    let mut winners = answers.iter().enumerate().filter(|(_, answer)| **answer == Answer::Done).map(|(racer, _)| racer);
    match (winners.next(), winners.next(), stored) {
        (Some(winner), None, Stored::Of(racer)) if winner == racer => Round::OneWinner,
        (Some(_), ..) | (_, _, Stored::Other) => Round::Broken,
        // No writer was acknowledged, but bytes are stored: a lost answer, whose writer can find out by reading.
        (None, _, Stored::Of(_)) => Round::OneWinner,
        (None, _, Stored::Nothing) => Round::Unclear,
    }
}

/// Verdict on all races.
pub(super) fn races(rounds: &[Round]) -> Verdict {
    let count =
        |wanted: Round| u32::try_from(rounds.iter().filter(|round| **round == wanted).count()).unwrap_or(u32::MAX);
    match (count(Round::Broken), count(Round::OneWinner)) {
        (0, 0) => Verdict::Unclear,
        (0, _) => Verdict::Works,
        (broken, sound) => Verdict::Racy { broken, rounds: broken + sound },
    }
}

/// Verdict on a conditional change, tried with a stale and with the current condition.
pub(super) fn condition(stale: Answer, current: Answer) -> Verdict {
    match (stale, current) {
        (Answer::Done, _) => Verdict::Ignored,
        (Answer::Conflict, Answer::Done) => Verdict::Works,
        (Answer::Failed, _) | (_, Answer::Failed) => Verdict::Unclear,
        _ => Verdict::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::Answer::{Conflict, Done, Failed, Unsupported};
    use super::*;

    #[test]
    fn a_second_create_must_be_refused_and_must_not_write() {
        assert_eq!(twice(Done, Conflict, Stored::Of(0)), Some(Verdict::Works));
        assert_eq!(twice(Done, Done, Stored::Of(1)), Some(Verdict::Ignored));
        assert_eq!(twice(Done, Done, Stored::Of(0)), Some(Verdict::Ignored));
        assert_eq!(twice(Done, Conflict, Stored::Of(1)), Some(Verdict::Ignored));
        assert_eq!(twice(Done, Failed, Stored::Of(1)), Some(Verdict::Ignored));
        assert_eq!(twice(Unsupported, Unsupported, Stored::Nothing), Some(Verdict::Refused));
        assert_eq!(twice(Conflict, Conflict, Stored::Nothing), Some(Verdict::Refused));
        assert_eq!(twice(Failed, Conflict, Stored::Of(0)), None);
        assert_eq!(twice(Done, Failed, Stored::Of(0)), None);
    }

    #[test]
    fn a_race_has_one_winner_whose_bytes_are_there() {
        assert_eq!(round(&[Conflict, Done, Conflict], Stored::Of(1)), Round::OneWinner);
        assert_eq!(round(&[Done, Done, Conflict], Stored::Of(1)), Round::Broken);
        assert_eq!(round(&[Conflict, Done, Conflict], Stored::Of(2)), Round::Broken);
        assert_eq!(round(&[Conflict, Done], Stored::Nothing), Round::Broken);
        assert_eq!(round(&[Conflict, Failed], Stored::Other), Round::Broken);
    }

    #[test]
    fn a_failure_is_no_verdict_but_what_is_stored_is() {
        assert_eq!(round(&[Failed, Conflict], Stored::Of(0)), Round::OneWinner);
        assert_eq!(round(&[Failed, Failed], Stored::Nothing), Round::Unclear);
        assert_eq!(races(&[Round::Unclear, Round::OneWinner]), Verdict::Works);
        assert_eq!(races(&[Round::Unclear]), Verdict::Unclear);
        let some_broken = [Round::OneWinner, Round::Broken, Round::Unclear];
        assert_eq!(races(&some_broken), Verdict::Racy { broken: 1, rounds: 2 });
    }

    #[test]
    fn a_condition_holds_both_ways() {
        assert_eq!(condition(Conflict, Done), Verdict::Works);
        assert_eq!(condition(Done, Done), Verdict::Ignored);
        assert_eq!(condition(Conflict, Conflict), Verdict::Refused);
        assert_eq!(condition(Unsupported, Unsupported), Verdict::Refused);
        assert_eq!(condition(Conflict, Failed), Verdict::Unclear);
    }
}
