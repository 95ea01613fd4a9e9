//! Likeness of words, to tell what was meant by a mistyped one.

/// Levenshtein distance of `a` and `b` in bytes; none if it is more than `most`.
pub(crate) fn edits(a: &[u8], b: &[u8], most: usize) -> Option<usize> {
    if a.len().abs_diff(b.len()) > most {
        return None;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (at, from) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(row.first_mut()?, at + 1);
        let mut left = at + 1;
        for (to, cell) in b.iter().zip(row.iter_mut().skip(1)) {
            let replaced = diagonal + usize::from(from != to);
            diagonal = *cell;
            left = replaced.min(diagonal + 1).min(left + 1);
            *cell = left;
        }
        if row.iter().min().is_some_and(|least| *least > most) {
            return None;
        }
    }
    row.last().copied().filter(|edits| *edits <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted_up_to_the_most() {
        let cases = [("", "", Some(0)), ("tenant", "tenant", Some(0)), ("tenant", "tenants", Some(1))];
        let others =
            [("residancy", "residency", Some(1)), ("tneant", "tenant", Some(2)), ("license", "residency", None)];
        for (a, b, expected) in cases.into_iter().chain(others) {
            assert_eq!(edits(a.as_bytes(), b.as_bytes(), 2), expected, "{a} {b}");
            assert_eq!(edits(b.as_bytes(), a.as_bytes(), 2), expected, "{b} {a}");
        }
    }
}
