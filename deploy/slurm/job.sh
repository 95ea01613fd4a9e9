#!/bin/bash
#SBATCH --gres=gpu:8
#BB_LUA towline inputs=team-a/run-7@latest,team-a/tokens stage_in lease=12h
#BB_LUA towline stage_out=/shared/team-a/eval:team-a/eval
towline restore team-a/run-7@latest /scratch/run-7      # from the cache of this site: $TOWLINE_SITE
