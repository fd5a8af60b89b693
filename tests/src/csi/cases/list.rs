//! ListVolumes and ControllerGetVolume.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::{ControllerGetVolumeRequest, ListVolumesRequest, Volume};
use tonic::Code;

use crate::csi::case::{CREATE, GET, LIST, cases};
use crate::csi::cx::{Answer, Cx, refused};

cases! { [CREATE]
    a_new_volume_is_listed: LIST;
    a_listed_volume_is_as_it_was_made: LIST;
    a_page_is_no_longer_than_asked_and_none_is_missing: LIST;
    a_page_longer_than_the_list_is_the_last: LIST;
    an_unknown_starting_token_is_aborted: LIST;
    a_negative_number_of_entries_is_invalid_argument: LIST;
    a_page_that_was_deleted_meanwhile_does_no_harm: LIST;
    get_volume_without_id_is_invalid_argument: GET;
    get_volume_of_an_unknown_volume_is_not_found: GET;
    get_volume_is_as_it_was_made: GET;
}

fn page(cx: &Cx<'_>, max_entries: i32, token: &str) -> Answer<(Vec<Volume>, String)> {
    let request = ListVolumesRequest { max_entries, starting_token: token.to_owned() };
    let answer = cx.driver.list_volumes(request)?;
    let volumes = answer.entries.into_iter().filter_map(|entry| entry.volume).collect();
    Ok((volumes, answer.next_token))
}

fn a_new_volume_is_listed(cx: &mut Cx<'_>) -> Result<()> {
    let made = cx.volume()?;
    let (listed, _) = page(cx, 0, "")?;
    ensure!(listed.iter().any(|one| one.volume_id == made.volume_id), "{made:?} is not listed");
    Ok(())
}

fn a_listed_volume_is_as_it_was_made(cx: &mut Cx<'_>) -> Result<()> {
    let made = cx.volume()?;
    let (listed, _) = page(cx, 0, "")?;
    let listed = listed.into_iter().find(|one| one.volume_id == made.volume_id);
    let listed = listed.context("it is not listed")?;
    ensure!(listed.capacity_bytes == made.capacity_bytes, "{listed:?} and {made:?}");
    ensure!(listed.volume_context == made.volume_context, "{listed:?} and {made:?}");
    Ok(())
}

fn a_page_is_no_longer_than_asked_and_none_is_missing(cx: &mut Cx<'_>) -> Result<()> {
    let mut made = BTreeSet::new();
    for _ in 0..5 {
        made.insert(cx.volume()?.volume_id);
    }
    for length in [1, 2, 3] {
        let listed = cx.driver.all_volumes(length)?;
        let ids: BTreeSet<String> = listed.iter().map(|one| one.volume_id.clone()).collect();
        ensure!(ids.len() == listed.len(), "one stands on two pages of {length}");
        ensure!(ids.is_superset(&made), "pages of {length} lack some of {made:?}");
    }
    Ok(())
}

fn a_page_longer_than_the_list_is_the_last(cx: &mut Cx<'_>) -> Result<()> {
    cx.volume()?;
    let (_, token) = page(cx, i32::MAX, "")?;
    ensure!(token.is_empty(), "there is more after all: {token:?}");
    let (_, token) = page(cx, 0, "")?;
    ensure!(token.is_empty(), "there is more after all: {token:?}");
    Ok(())
}

fn an_unknown_starting_token_is_aborted(cx: &mut Cx<'_>) -> Result<()> {
    for token in ["no-such-token", "-1", "99999999999999999999", "🦀", "\0"] {
        refused(page(cx, 0, token), Code::Aborted)?;
    }
    Ok(())
}

fn a_negative_number_of_entries_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    for entries in [-1, i32::MIN] {
        refused(page(cx, entries, ""), Code::InvalidArgument)?;
    }
    Ok(())
}

fn a_page_that_was_deleted_meanwhile_does_no_harm(cx: &mut Cx<'_>) -> Result<()> {
    for _ in 0..3 {
        cx.volume()?;
    }
    let (first, token) = page(cx, 2, "")?;
    ensure!(!token.is_empty(), "a page of 2 of at least 3, and no more");
    for volume in first {
        // Only what is ours may go.
        if volume.volume_id.contains("suite-") {
            cx.delete(&volume.volume_id)?;
        }
    }
    match page(cx, 0, &token) {
        Ok(_) => Ok(()),
        // Then the caller starts again.
        Err(status) if status.code() == Code::Aborted => Ok(()),
        Err(status) => Err(status.into()),
    }
}

fn get(cx: &Cx<'_>, id: &str) -> Answer<Option<Volume>> {
    let request = ControllerGetVolumeRequest { volume_id: id.to_owned() };
    cx.driver.controller_get_volume(request).map(|answer| answer.volume)
}

fn get_volume_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    refused(get(cx, ""), Code::InvalidArgument).map(|_| ())
}

fn get_volume_of_an_unknown_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    for id in [gone.as_str(), "nothing", "a/b", "a/b/c", "../x", "🦀"] {
        refused(get(cx, id), Code::NotFound)?;
    }
    Ok(())
}

fn get_volume_is_as_it_was_made(cx: &mut Cx<'_>) -> Result<()> {
    let made = cx.volume()?;
    let got = get(cx, &made.volume_id)?.context("no volume")?;
    ensure!(got.volume_id == made.volume_id, "{got:?} and {made:?}");
    ensure!(got.capacity_bytes == made.capacity_bytes, "{got:?} and {made:?}");
    ensure!(got.accessible_topology == made.accessible_topology, "{got:?} and {made:?}");
    Ok(())
}
