//! `cargo ci test safety`: mistakes of an operator, odd devices and odd images, each by the tests
//! that a user would recognise it in, and a line for each.

use std::path::Path;

use anyhow::{Result, ensure};

use super::tests_passed;
use crate::steps::{Outcome, Steps};
use crate::{built, check, command, requirements, setup};

/// Tests of one file of a package.
struct Group {
    package: &'static str,
    /// `None` for unit tests.
    file: Option<&'static str>,
    tests: &'static [&'static str],
}

/// A mistake, and the tests that show that it does no harm.
struct Item {
    mistake: &'static str,
    groups: &'static [Group],
}

const fn file(package: &'static str, file: &'static str, tests: &'static [&'static str]) -> Group {
    Group { package, file: Some(file), tests }
}

const fn units(package: &'static str, tests: &'static [&'static str]) -> Group {
    Group { package, file: None, tests }
}

const ITEMS: &[Item] = &[
    Item {
        mistake: "a pool is not where it was",
        groups: &[file(
            "blockd",
            "missing_pools",
            &[
                "a_missing_pool_is_not_made_anew_and_comes_back_whole",
                "a_missing_pool_is_picked_up_when_the_configuration_is_read_again",
                "another_pool_in_the_place_of_a_missing_one_is_refused",
                "an_empty_file_in_the_place_of_a_missing_pool_stays_empty",
                "only_an_explicit_word_starts_a_missing_pool_anew",
                "a_pool_with_volumes_survives_the_loss_of_the_state_directory",
                "a_volatile_pool_is_made_anew_after_a_boot_and_missing_before",
                "a_volatile_pool_on_a_disk_is_missing_after_a_boot_too",
                "a_pool_of_which_only_some_devices_are_there_is_not_created",
                "a_pool_that_was_renamed_is_not_made_anew_at_its_old_place",
                "a_pool_in_memory_is_served_by_the_name_of_a_former_file",
                "a_pool_of_a_region_is_missing_without_its_region_and_the_daemon_stays_for_it",
            ],
        )],
    },
    Item {
        mistake: "a disk is absent at the start",
        groups: &[file(
            "blockd",
            "devices",
            &["a_disk_that_is_absent_at_the_start_is_missing_and_comes_back"],
        )],
    },
    Item {
        mistake: "a missing pool is started anew",
        groups: &[file(
            "blockd",
            "missing_pools",
            &[
                "a_missing_pool_is_started_anew_as_it_is_configured",
                "another_pool_is_neither_replaced_nor_adopted_by_an_explicit_word",
                "an_attachment_belongs_to_its_pool_and_not_to_another_of_the_same_name",
            ],
        )],
    },
    Item {
        mistake: "the state directory is full, damaged or lost in part",
        groups: &[
            file(
                "blockd",
                "missing_pools",
                &[
                    "a_pool_with_attachments_or_made_at_run_time_counts_as_served_without_the_list",
                    "a_damaged_list_of_served_pools_is_not_to_be_removed_while_a_pool_is_missing",
                ],
            ),
            file(
                "blockd",
                "devices",
                &["a_state_directory_that_is_full_keeps_no_pool_from_being_served"],
            ),
        ],
    },
    Item {
        mistake: "a pool is waited for while the daemon has other work, or is to end",
        groups: &[file(
            "blockd",
            "missing_pools",
            &["pools_are_made_and_the_daemon_ends_while_another_pool_is_waited_for"],
        )],
    },
    Item {
        mistake: "accept_loss of one pool meets another",
        groups: &[file(
            "blockd",
            "missing_pools",
            &["a_pool_made_at_run_time_does_not_accept_loss_for_another_pool"],
        )],
    },
    Item {
        mistake: "two pools of the configuration lead to one new file",
        groups: &[file(
            "blockd",
            "missing_pools",
            &["the_loser_of_a_race_to_create_a_pool_leaves_the_file_of_the_winner"],
        )],
    },
    Item {
        mistake: "another program opens the disk of a pool, or has it open",
        groups: &[file(
            "blockd",
            "devices",
            &[
                "other_programs_cannot_have_a_disk_that_is_served",
                "a_disk_that_others_use_is_refused_with_what_has_it",
                "tools_that_write_take_the_claim_too",
                "a_superblock_that_another_program_overwrote_stops_its_pool_and_no_other",
                "one_damaged_copy_of_a_superblock_does_not_stop_its_pool",
            ],
        )],
    },
    Item {
        mistake: "two hosts, or two paths of one host, open a pool",
        groups: &[
            file(
                "blockd-tests",
                "claims",
                &[
                    "a_pool_file_and_a_loop_device_over_it_are_never_both_served",
                    "two_hosts_that_start_at_once_are_never_both_served",
                    "two_hosts_that_make_a_pool_at_once_make_one",
                    "an_open_pool_is_refused_on_another_host",
                    "a_tool_that_writes_sees_what_another_path_wrote_since_its_disk_was_cached",
                    "a_host_that_froze_writes_nothing_after_another_has_the_pool",
                    "a_host_that_froze_goes_on_where_no_other_has_claimed_the_pool",
                    "a_daemon_that_was_killed_is_followed_at_once_on_its_host",
                    "an_orderly_end_leaves_a_free_claim_and_a_local_file_has_none",
                ],
            ),
            file(
                "blockd-tests",
                "shared_storage",
                &[
                    "a_pool_made_at_once_on_a_file_and_on_a_loop_device_over_it_is_made_once",
                    "the_file_below_a_loop_device_is_locked_for_daemons_of_other_containers_too",
                    "a_disk_that_was_cached_when_it_was_blank_is_not_taken_for_blank",
                    "a_pool_without_direct_io_is_read_from_the_media_after_its_claim_and_warned_of",
                    "a_directory_of_host_locks_that_another_user_made_is_refused",
                    "a_write_that_waits_for_a_late_claim_is_not_refused_for_want_of_space",
                    "a_dry_run_of_journal_replay_is_refused_where_another_host_has_the_pool",
                    "a_tool_that_writes_watches_other_hosts_as_long_as_it_is_asked_to",
                ],
            ),
            file(
                "blockd",
                "claim_page",
                &[
                    "a_claim_is_renewed_without_a_flush_of_its_device",
                    "a_closed_pool_is_claimed_until_its_last_discard_has_ended",
                    "a_tools_writes_are_on_the_media_at_once_and_refused_after_its_claim_was_lost",
                    "a_tool_claims_the_first_device_also_where_that_has_lost_its_superblock",
                    "a_pool_of_a_later_release_that_is_only_read_keeps_its_claim_page",
                ],
            ),
            file(
                "blockd-sim",
                "claims",
                &[
                    "no_write_lands_after_another_open_owns_the_pool",
                    "each_rule_of_the_claim_is_needed",
                    "an_owner_at_home_may_lose_to_a_claim_under_way",
                ],
            ),
        ],
    },
    Item {
        mistake: "a path leads to no disk, to memory, or to a pool that is open",
        groups: &[file(
            "blockd",
            "missing_pools",
            &[
                "no_pool_file_is_made_below_dev_or_in_memory",
                "a_device_that_is_no_file_and_no_disk_is_refused_at_once",
                "another_name_of_an_open_pool_is_refused_at_once",
                "a_pool_file_that_is_there_is_held_to_the_rules_for_new_ones",
            ],
        )],
    },
    Item {
        mistake: "an image names other files",
        groups: &[file(
            "blockd",
            "cli_import",
            &[
                "images_of_all_formats_are_imported_with_their_bytes_and_their_format_is_printed",
                "a_qcow2_image_that_names_another_file_is_refused_by_that_name",
                "a_vmdk_vhd_or_vhdx_that_names_another_file_is_refused_by_that_name",
                "follow_backing_reads_the_local_files_that_an_image_names_and_lists_them",
                "qemu_img_reaches_no_other_file_and_no_network_during_an_import",
                "an_image_that_changes_while_it_is_imported_leaves_no_volume",
                "a_vmdk_descriptor_that_hides_a_name_is_refused",
                "a_vmdk_parent_is_found_where_the_header_names_no_descriptor",
                "a_backing_file_without_a_format_is_not_followed",
                "an_image_that_is_a_fifo_is_refused_at_once",
            ],
        )],
    },
    Item {
        mistake: "power fails after a pool's file was made",
        groups: &[file("blockd", "devices", &["the_entry_of_a_new_pool_file_is_durable"])],
    },
    Item {
        mistake: "a dry run of journal replay says something else than the run",
        groups: &[file(
            "blockd",
            "cli_tools",
            &["a_dry_run_of_journal_replay_prints_the_counts_of_the_real_run_and_writes_nothing"],
        )],
    },
    Item {
        mistake: "storage restarts below a host that goes on",
        groups: &[file(
            "blockd",
            "devices",
            &["a_ring_is_not_replayed_over_a_disk_that_was_restarted"],
        )],
    },
    Item {
        mistake: "health speaks of writes that wait no more",
        groups: &[file(
            "blockd-tests",
            "space_health",
            &[
                "a_write_that_was_refused_after_its_timeout_is_no_longer_reported_as_waiting",
                "a_write_that_ended_with_its_attachment_is_no_longer_reported_as_waiting",
            ],
        )],
    },
    Item {
        mistake: "an image for virtual machines lies where a flush of the guest is not durable",
        groups: &[units(
            "blockd-csi",
            &[
                "pmem::tests::kata_image_in_a_pooled_class_is_refused_and_the_error_names_pmem_direct",
                "controller::tests::pmem::kata_image_is_app_direct_and_needs_a_pmem_direct_class",
                "node::tests::pmem::app_direct_image_is_refused_on_a_file_system_without_dax",
                "node::tests::pmem::existing_image_without_dax_stays_mounted_is_not_staged_again_and_keeps_its_data",
            ],
        )],
    },
    Item {
        mistake: "space that was promised is given to others, or one pool's shutdown ends another",
        groups: &[file(
            "blockd",
            "extend",
            &[
                "an_answered_request_has_a_quantum_for_its_volume_whatever_neighbours_write",
                "where_less_than_a_quantum_is_left_a_request_gets_that",
                "a_shutdown_closes_its_pool_alone_while_another_goes_on_with_its_io",
                "a_daemon_with_two_pools_outlives_both_and_opens_them_at_its_next_start",
                "a_shutdown_ends_the_daemon_in_order_and_then_the_connection",
            ],
        )],
    },
    Item {
        mistake: "a manifest names old sidecars, or the plugin is restarted for its daemon",
        groups: &[
            file(
                "blockd-csi",
                "manifests",
                &[
                    "sidecars_have_the_versions_of_the_documentation_and_none_is_too_old",
                    "liveness_is_the_plugins_own_and_readiness_the_daemons",
                    "the_provisioner_may_protect_snapshots",
                    "daemons_in_pods_share_the_locks_of_their_host",
                ],
            ),
            file(
                "blockd-tests",
                "csi",
                &["reported::a_plugin_whose_daemon_is_away_is_alive_and_not_ready"],
            ),
        ],
    },
    Item {
        mistake: "a pool's lock is held, by the daemon itself or by IO of a dead one",
        groups: &[
            file(
                "blockd",
                "devices",
                &[
                    "a_new_pool_does_not_wait_for_its_own_lock",
                    "a_pool_that_could_not_be_opened_is_unlocked_at_once",
                    "a_lock_that_is_waited_for_is_reported_to_the_log_and_the_service_manager",
                ],
            ),
            file("blockd", "pools", &["a_pool_that_was_just_made_is_opened_without_a_wait"]),
        ],
    },
];

/// Rules that random histories rarely meet, by the switches that remove them.
const RULES: [&str; 8] = [
    "CheckpointFlushesFirst",
    "CommitFlushesFirst",
    "ReleaseUndurable",
    "DrainOneEpoch",
    "NoRestamp",
    "NoCancelWithoutLeaf",
    "FillUndrained",
    "LsnNotCarried",
];
/// Seeds that each removal has to be noticed with: fixed ones, and some new random ones.
const SEEDS: [&str; 5] = ["--mutate", "--seeds", "20", "--fresh", "3"];

/// Runs all of it; true when nothing failed.
#[must_use]
pub(crate) fn run(root: &Path) -> bool {
    let mut steps = Steps::new();
    steps.run("tools", || setup::ensure(&setup::all()).map(|()| Outcome::Passed));
    steps.run("daemon, plugin, programs", || built::build(root));
    for item in ITEMS {
        steps.run(item.mistake, || item.run(root));
    }
    steps.run("a rule that is removed is noticed by each of 23 seeds", || {
        let only = RULES.iter().flat_map(|rule| ["--only", rule]);
        let words: Vec<String> = SEEDS.into_iter().chain(only).map(str::to_owned).collect();
        crate::forward::sim(root, "sim", &words).map(|()| Outcome::Passed)
    });
    steps.run("requirements", || requirements::run(root, false).map(|()| Outcome::Passed));
    check::manifests(&mut steps, root);
    steps.finish()
}

impl Item {
    fn run(&self, root: &Path) -> Result<Outcome> {
        let mut passed = 0;
        for group in self.groups {
            let mut cargo = command::cargo(root);
            cargo.args(["test", "--quiet", "--package", group.package]);
            match group.file {
                Some(file) => cargo.args(["--test", file]),
                None => cargo.arg("--lib"),
            };
            cargo.envs(built::environment(root)).arg("--").arg("--exact").args(group.tests);
            let ran = tests_passed(&command::run_and_keep(&mut cargo)?);
            let wanted = u64::try_from(group.tests.len())?;
            // A test that was renamed must not look as if it had passed.
            ensure!(ran == wanted, "{ran} of {wanted} tests ran: {}", group.tests.join(", "));
            passed += ran;
        }
        println!("{}: {passed} tests passed", self.mistake);
        Ok(Outcome::Passed)
    }
}
