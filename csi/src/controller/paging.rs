//! Lists in pages. A token is the id of the last entry that was given: creations and deletions
//! between two pages do not move other entries.

use crate::error::Error;
use crate::limits;

/// The entries of a page, and the token of the next one; empty after the last.
///
/// # Errors
/// INVALID_ARGUMENT: the number of entries is negative. ABORTED: no page ends with this token.
pub(super) fn page<T>(
    mut entries: Vec<(String, T)>,
    max_entries: i32,
    token: &str,
    is_id: impl Fn(&str) -> bool,
) -> Result<(Vec<T>, String), Error> {
    let wanted = usize::try_from(max_entries)
        .map_err(|_| Error::invalid("max_entries", max_entries, "0 or more"))?;
    limits::string("starting_token", token)?;
    if !token.is_empty() && !is_id(token) {
        let what = format!("starting_token {}", blockd_csi_base::error::shown(token));
        let problem = "is no next_token of ours: begin without one".to_owned();
        return Err(Error::Aborted { what, problem });
    }
    entries.retain(|(id, _)| id.as_str() > token);
    entries.sort_by(|one, other| one.0.cmp(&other.0));
    let mut next = String::new();
    if wanted != 0 && entries.len() > wanted {
        entries.truncate(wanted);
        next = entries.last().map(|(id, _)| id.clone()).unwrap_or_default();
    }
    Ok((entries.into_iter().map(|(_, entry)| entry).collect(), next))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};
    use tonic::Code;

    use super::*;

    fn entries(numbers: impl Iterator<Item = u32>) -> Vec<(String, u32)> {
        numbers.map(|number| (format!("p/{number:03}"), number)).collect()
    }

    fn is_id(token: &str) -> bool {
        token.starts_with("p/")
    }

    #[test]
    fn a_token_that_was_never_given_is_aborted() {
        for token in ["x", "0", "p"] {
            let error = page(entries(0..9), 3, token, is_id).unwrap_err();
            assert_eq!(error.code(), Code::Aborted, "{token}");
        }
        let error = page(entries(0..9), -1, "", is_id).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        let long = format!("p/{}", "0".repeat(1 << 20));
        assert_eq!(page(entries(0..9), 1, &long, is_id).unwrap_err().code(), Code::InvalidArgument);
    }

    #[test]
    fn deletions_between_two_pages_do_not_move_other_entries() {
        let (first, next) = page(entries(0..9), 3, "", is_id).unwrap();
        assert_eq!(first, [0, 1, 2]);
        let left = entries((0..9).filter(|number| *number != 2));
        assert_eq!(page(left, 3, &next, is_id).unwrap().0, [3, 4, 5]);
    }

    proptest! {
        #[test]
        fn pages_give_each_entry_once_in_order(count in 0_u32..50, max in 0_i32..20) {
            let (mut seen, mut token, mut pages) = (Vec::new(), String::new(), 0);
            loop {
                let all = entries((0..count).rev());
                let (entries, next) = page(all, max, &token, is_id).unwrap();
                prop_assert!(max == 0 || entries.len() <= usize::try_from(max).unwrap());
                seen.extend(entries);
                pages += 1;
                if next.is_empty() {
                    break;
                }
                token = next;
            }
            prop_assert_eq!(seen, (0..count).collect::<Vec<_>>());
            let max = u32::try_from(max).unwrap();
            prop_assert_eq!(pages, if max == 0 { 1 } else { count.div_ceil(max).max(1) });
        }
    }
}
