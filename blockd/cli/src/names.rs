//! Volumes as they are named on the command line: `NAME`, or `POOL/NAME`.

use blockd_api::v1::{ListVolumesRequest, Volume};
use blockd_media::error::{Error, ErrorKind, shown};

use super::Context;

/// Pools that an error lists.
const MAX_LISTED: usize = 5;

/// Splits names of volumes of one pool. Afterwards the names are without the pool, and `pool`,
/// which has the value of `--pool`, is the pool that they name. The first name has to have it
/// where `--pool` does not; the others may repeat it.
pub(crate) fn place<'a>(
    pool: &mut String,
    names: impl IntoIterator<Item = &'a mut String>,
) -> Result<(), Error> {
    let mut known = (!pool.is_empty()).then(|| pool.clone());
    for (at, text) in names.into_iter().enumerate() {
        let Some((of, name)) = text.split_once('/') else { continue };
        let refused = |allowed: String| Err(Error::invalid("volume", &*text, allowed));
        if name.is_empty() || name.contains('/') {
            return refused("NAME, POOL/NAME, or /NAME for the default pool".to_owned());
        }
        match &known {
            Some(known) if *known != of => {
                return refused(format!(
                    "in pool {}, as --pool or an earlier name says",
                    shown(known)
                ));
            }
            None if at > 0 => {
                return refused("in the pool of the first name: write POOL/NAME there".to_owned());
            }
            _ => known = Some(of.to_owned()),
        }
        *text = name.to_owned();
    }
    *pool = known.unwrap_or_default();
    Ok(())
}

/// The name of a volume as every command takes it, with its pool.
pub(crate) fn full(volume: &Volume) -> String {
    format!("{}/{}", volume.pool, volume.name)
}

/// How the names of hidden volumes begin, which are partly received. Only `blockd receive` makes
/// them, and `blockd list` leaves them out.
const HIDDEN: &str = ".receive-";

/// The name of the hidden volume of a volume.
pub(crate) fn hidden(name: &str) -> String {
    format!("{HIDDEN}{name}")
}

/// Whether this is the name of a hidden volume.
pub(crate) fn is_hidden(name: &str) -> bool {
    name.starts_with(HIDDEN)
}

/// Refuses a new name that is one of a hidden volume.
pub(crate) fn check_visible(name: &str) -> Result<(), Error> {
    match is_hidden(name) {
        false => Ok(()),
        true => Err(Error::invalid(
            "name",
            name,
            format!("one that does not begin with {HIDDEN}, as those do that are partly received"),
        )),
    }
}

/// The error of a volume that does not exist, with the pools that have one of that name.
pub(crate) async fn with_places(context: &Context, error: Error) -> Error {
    let detail = error.detail();
    if error.kind() != ErrorKind::NotFound || detail.field != "volume" {
        return error;
    }
    let listed = async {
        let request = ListVolumesRequest { pool: String::new(), brief: true };
        context.client().await?.list_volumes(request).await
    };
    // The first error is reported in any case.
    let Ok(answer) = listed.await else { return error };
    let namesakes = answer.volumes.iter().filter(|one| shown(&one.name) == detail.value);
    let pools: Vec<String> = namesakes.map(|one| shown(&one.pool)).collect();
    match note(&pools, &detail.value) {
        Some(note) => error.with_note(&note),
        None => error,
    }
}

fn note(pools: &[String], name: &str) -> Option<String> {
    Some(match pools {
        [] => return None,
        [pool] => format!("pool {pool} has a volume of this name: use {pool}/{name}"),
        [first, ..] => {
            let mut list = pools.iter().take(MAX_LISTED).cloned().collect::<Vec<_>>().join(", ");
            if pools.len() > MAX_LISTED {
                list.push_str(", ...");
            }
            let count = pools.len();
            format!(
                "{count} pools have a volume of this name ({list}): use POOL/NAME, like {first}/{name}"
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(pool: &str, names: &[&str]) -> Result<(String, Vec<String>), String> {
        let (mut pool, mut names) =
            (pool.to_owned(), names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        place(&mut pool, &mut names).map_err(|error| error.to_string())?;
        Ok((pool, names))
    }

    #[test]
    fn a_pool_is_named_before_the_volume_or_by_the_option() {
        let cases: [(&str, &[&str], &str); 7] = [
            ("", &["a"], ""),
            ("p", &["a"], "p"),
            ("", &["p/a"], "p"),
            ("p", &["p/a", "b"], "p"),
            ("p", &["a", "p/b"], "p"),
            ("", &["p/a", "b", "p/c"], "p"),
            ("", &["/a"], ""),
        ];
        for (option, names, pool) in cases {
            let plain = ["a", "b", "c"][..names.len()].iter().map(|&name| name.to_owned());
            assert_eq!(placed(option, names), Ok((pool.to_owned(), plain.collect())), "{names:?}");
        }
    }

    #[test]
    fn names_of_two_pools_are_refused() {
        let cases: [(&str, &[&str], &str); 6] = [
            ("p", &["q/a"], "volume is q/a: must be in pool p, as --pool or an earlier name says"),
            (
                "",
                &["p/a", "q/b"],
                "volume is q/b: must be in pool p, as --pool or an earlier name says",
            ),
            ("p", &["/a"], "volume is /a: must be in pool p, as --pool or an earlier name says"),
            ("", &["a", "p/b"], "volume is p/b: must be in the pool of the first name"),
            ("", &["p/"], "volume is p/: must be NAME, POOL/NAME"),
            ("", &["p/a/b"], "volume is p/a/b: must be NAME, POOL/NAME"),
        ];
        for (option, names, problem) in cases {
            let error = placed(option, names).unwrap_err();
            assert!(error.starts_with(problem), "{names:?}: {error}");
        }
    }

    #[test]
    fn pools_with_a_volume_of_that_name_are_listed() {
        let said = |count: usize| {
            note(
                &["p", "q", "r", "s", "t", "u"][..count]
                    .iter()
                    .map(|&one| one.to_owned())
                    .collect::<Vec<_>>(),
                "a",
            )
        };
        assert_eq!(said(0), None);
        assert_eq!(said(1).unwrap(), "pool p has a volume of this name: use p/a");
        let two = "2 pools have a volume of this name (p, q): use POOL/NAME, like p/a";
        assert_eq!(said(2).unwrap(), two);
        let six = "6 pools have a volume of this name (p, q, r, s, t, ...)";
        assert!(said(6).unwrap().starts_with(six));
    }
}
