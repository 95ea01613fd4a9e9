//! Judges what was seen of a store. Pure: answers and stored bytes in, a verdict out.
//!
//! Answers can lie (a create acknowledged whose bytes are not there), so what is stored decides. A failure (5xx, a lost
//! connection) is no verdict by itself: the writer cannot know, but what is stored tells.

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
    /// No answer that means anything.
    Failed,
}

/// Writer whose bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    /// Keys of this writer.
    Of(usize),
    /// Nobody's.
    Nothing,
    /// Bytes that nobody wrote.
    Other,
}

/// One race of creates for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Round {
    /// One writer's bytes are there, and no other was told that it won.
    OneWinner,
    /// Several were told that they won, or one whose bytes are not there, or the bytes are nobody's.
    Broken,
    /// Nothing can be said: every request failed.
    Unclear,
}

/// Two creates of one key, one after the other; `None` if it has to be tried again.
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

/// A race: what each racer was told, and whose bytes were there afterwards.
pub(super) fn round(answers: &[Answer], stored: Stored) -> Round {
    let mut winners = answers.iter().enumerate().filter(|(_, answer)| **answer == Answer::Done).map(|(racer, _)| racer);
    match (winners.next(), winners.next(), stored) {
        (Some(winner), None, Stored::Of(racer)) if winner == racer => Round::OneWinner,
        (Some(_), ..) | (_, _, Stored::Other) => Round::Broken,
        // Nobody was acknowledged, yet one is there: a lost acknowledgement. Its writer finds out by reading.
        (None, _, Stored::Of(_)) => Round::OneWinner,
        (None, _, Stored::Nothing) => Round::Unclear,
    }
}

/// All races together.
pub(super) fn races(rounds: &[Round]) -> Verdict {
    let count =
        |wanted: Round| u32::try_from(rounds.iter().filter(|round| **round == wanted).count()).unwrap_or(u32::MAX);
    match (count(Round::Broken), count(Round::OneWinner)) {
        (0, 0) => Verdict::Unclear,
        (0, _) => Verdict::Works,
        (broken, sound) => Verdict::Racy { broken, rounds: broken + sound },
    }
}

/// A conditional change: once with what was current a moment ago, once with what is.
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
